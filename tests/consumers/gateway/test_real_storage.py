# SPDX-License-Identifier: Apache-2.0
"""The drop-in calls in front of a real LMCache engine: DDR and disk, unordered hashes, sessions that share a prefix."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from semkv.bus.hashes import to_legacy
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.gateway.settings import GatewaySettings
from semkv.consumers.rank import RankIdentity, RankWorker
from semkv.consumers.storage import LMCacheStorage, PrefixForest
from semkv.engine_hooks.patches import apply_all, restore_all
from tests.consumers.gateway.conftest import Gateway, domain_of, running
from tests.support.lmcache_engine import Rig, lmcache_engine

pytestmark = pytest.mark.lmcache


@pytest.fixture
def patched() -> Iterator[None]:
    """The live-path patches, for this test alone."""
    apply_all()
    yield
    restore_all()


@dataclass
class Served:
    rig: Rig
    forest: PrefixForest
    gateway: Gateway

    def request(self, tokens: list[int], number: int) -> list[str]:
        """A request of a session that names none, served and over; its write-back."""
        hashes = self.rig.hashes(tokens)
        self.forest.record_lookup("default", None, hashes, f"r{number}", True)
        self.rig.serve(tokens)
        self.rig.settle()
        self.forest.finished([f"r{number}"])
        return [to_legacy(h) for h in hashes]

    async def tiers(self, texts: list[str]) -> list[list[str]]:
        return list((await self.gateway.post("locate", {"chunk_hashes": texts})).json()["chunk_tiers"])


@pytest.fixture
async def served(patched: None, settings: GatewaySettings, tmp_path: Path) -> AsyncIterator[Served]:
    with lmcache_engine(tmp_path) as rig:
        forest = PrefixForest()
        who = RankIdentity("e0", 0, 1, Role.STORAGE, domain_of(chunk_size=rig.chunk_size))
        worker = RankWorker(BusSettings(url=settings.bus.url), who, LMCacheStorage(rig.engine, forest)).start()
        try:
            assert worker.wait_ready(20)
            async with running(settings) as gateway:
                yield Served(rig, forest, gateway)
        finally:
            worker.stop()


async def test_unordered_hashes_come_back_from_the_disk(served: Served) -> None:
    tokens = served.rig.tokens(6)
    texts = served.request(tokens, 1)
    served.rig.drop_from_ddr(tokens)
    assert await served.tiers(texts) == [["disk"]] * 6
    shuffled = [*texts, texts[0]]
    random.Random(5).shuffle(shuffled)
    answer = await served.gateway.post("prefetch?wait=30", {"chunk_hashes": shuffled, "lookup_id": "turn_prefetch"})
    body = answer.json()
    assert answer.status_code == 200 and body["num_chunks"] == 7 and body["ranks"][0]["counts"] == {"loaded": 6}
    assert await served.tiers(texts) == [["cpu", "disk"]] * 6
    served.rig.check()


async def test_an_evict_of_everything_spares_the_prefix_that_others_share(served: Served) -> None:
    system = served.rig.tokens(3)
    mine = served.request([*system, *served.rig.tokens(2, seed=1)], 1)
    theirs = served.request([*system, *served.rig.tokens(2, seed=2)], 2)
    random.Random(5).shuffle(mine)
    body = (await served.gateway.post("evict", {"chunk_hashes": mine})).json()
    assert body["status"] == "success" and body["num_evicted"] == 2
    assert body["ranks"][0]["counts"] == {"removed": 2, "shared": 3}
    assert all(await served.tiers(theirs)), "nobody else's chain lost a chunk"
    served.rig.check()
    # The other session's end frees its own part too; the shared one stays while the first conversation may go on.
    body = (await served.gateway.post("evict", {"chunk_hashes": theirs})).json()
    assert body["num_evicted"] == 2 and body["ranks"][0]["counts"] == {"removed": 2, "shared": 3}
    served.rig.check()
    body = (await served.gateway.post("evict", {"chunk_hashes": theirs, "force": True})).json()
    assert body["field"] == "force", "overriding others is a right of its own"
