# SPDX-License-Identifier: Apache-2.0
"""What a real engine exports as metrics: the scheduler's process its events, the rank all that it does and holds."""

from __future__ import annotations

import asyncio

import pytest

from semkv.bus import connect, metrics
from semkv.bus.hashes import parse_all
from semkv.bus.status import Tier
from tests.end_to_end.conftest import CHUNK

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOPIC = " ".join(f"line {number}: what is counted can be watched." for number in range(40))
RANK = {"kv.instance": "engine", "kv.rank": "0"}


async def test_a_real_engine_exports_what_it_does_and_holds(world):
    came = world.metrics
    async with connect(world.nats.url) as kv:
        answer = await asyncio.to_thread(world.complete, TOPIC, session="counted")
        chain = parse_all(answer.chunk_hashes)
        before = {name: came.total(name, **RANK) for name in ("semkv.rank.commands", "semkv.rank.moved")}
        assert (await (await kv.evict(chain, tiers=[Tier.CPU], session="counted")).result(60)).ok
        assert (await (await kv.prefetch(chain, session="counted")).result(60)).counts() == {"loaded": len(chain)}
        assert await asyncio.to_thread(world.complete, TOPIC, session="counted")
    size = len(chain) * CHUNK * 1024

    def there(receiver):
        return (
            receiver.total("semkv.rank.commands", **RANK) >= before["semkv.rank.commands"] + 2
            and receiver.total("semkv.rank.moved", **RANK) >= before["semkv.rank.moved"] + 2 * size
            and receiver.total("semkv.rank.chunks", op="prefetch", status="loaded", **RANK) >= len(chain)
            and receiver.total("semkv.rank.prefetched", fate="useful", **RANK) >= len(chain)
            and receiver.total("semkv.rank.forest.size", kind="conversations", **RANK) >= 1
            and receiver.total("semkv.rank.tier.used", tier="disk", **RANK) >= size
            and receiver.total("semkv.publisher.events", **{"kv.instance": "engine"}) >= 2
        )

    await asyncio.to_thread(came.wait, there, 60)
    seen = {metric.name for metric in metrics.ALL} - {metrics.UNREADABLE.name}  # nobody sent rubbish here
    assert seen <= came.metrics.keys()
    assert {"semkv-engine", "semkv-rank-0"} <= came.services
