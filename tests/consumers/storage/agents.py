# SPDX-License-Identifier: Apache-2.0
"""Conversations on a real engine whose forest is fed by the lookups it serves."""

from __future__ import annotations

from typing import Any

from semkv.consumers.storage import LMCacheStorage, PrefixForest
from semkv.engine_hooks.forest_feed import ForestFeed
from semkv.engine_hooks.lookup_client import SESSION_LABEL, TENANT_LABEL
from tests.support.lmcache_engine import Rig


class Agents:
    """Conversations on one engine, as its rank sees them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clock = 0.0
        self.forest = PrefixForest("default", clock=lambda: self.clock)
        self.feed = ForestFeed(rig.engine, self.forest, rig.chunk_size)
        self.storage = LMCacheStorage(rig.engine, self.forest)

    def turn(self, tokens: list[int], *, session: str | None = None, tenant: str = "default") -> tuple[int, ...]:
        """One whole request; afterwards its chunks are in DDR and on disk."""
        labels: dict[str, Any] = {TENANT_LABEL: tenant} | ({SESSION_LABEL: session} if session else {})
        request = self.rig.lookup(tokens, **labels)
        self.rig.retrieve(request, tokens)
        hashes = self.rig.store(tokens)
        self.feed.finished([request])
        return hashes
