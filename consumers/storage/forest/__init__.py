# SPDX-License-Identifier: Apache-2.0
"""The prefix forest: which chunks live conversations need, fed from the lookups a rank serves."""

from __future__ import annotations

from semkv.consumers.storage.forest.forest import PrefixForest

__all__ = ["PrefixForest"]
