# SPDX-License-Identifier: Apache-2.0
"""Storage operations of one rank: prefetch, evict, retain, release and locate on an LMCache engine."""

from __future__ import annotations

from semkv.consumers.storage.forest import PrefixForest
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control, OpResult, StorageOps, TierInfo

__all__ = ["Control", "LMCacheStorage", "OpResult", "PrefixForest", "StorageOps", "TierInfo"]
