# SPDX-License-Identifier: Apache-2.0
"""What passed on the bus, kept in a file and played again: `recording`, `model_rank`, `player`."""
