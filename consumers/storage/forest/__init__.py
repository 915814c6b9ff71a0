# SPDX-License-Identifier: Apache-2.0
"""The prefix forest: which chunks live conversations need, fed from the lookups a rank serves."""
