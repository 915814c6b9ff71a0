# SPDX-License-Identifier: Apache-2.0
"""The gateway's routes, one module per concern."""
