# SPDX-License-Identifier: Apache-2.0
"""A prefetch to the device on a real engine. Its pages are in host memory, and so are the copies: all else is real."""

from __future__ import annotations

import asyncio

import pytest

from semkv.bus import connect
from semkv.bus.hashes import parse_all
from semkv.bus.status import State, Tier
from semkv.cli.traces.store import by_trace, read_spans
from tests.end_to_end.conftest import CHUNK, SESSION, World
from tests.end_to_end.test_main_job import do, tiers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOPIC = " ".join(f"page {number}: what the device holds is read from the device." for number in range(40))


async def test_a_topic_goes_to_the_device_and_leaves_it_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMKV_TRACE_FILE", str(world.trace_file))
    async with connect(world.nats.url) as kv:
        baseline = await asyncio.to_thread(world.complete, TOPIC, plain=True)
        answer = await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        chain = parse_all(answer.chunk_hashes)
        size = len(chain) * CHUNK * 1024
        await do(kv.evict(chain, tiers=[Tier.CPU], session=SESSION))

        result = await do(kv.prefetch(chain, tier=Tier.DEVICE, session=SESSION))
        assert result.state == State.SUCCEEDED, result.reason
        (rank,) = result.results
        assert rank.bytes_by_tier == {"disk": size, "device": size}
        assert all({Tier.DEVICE, Tier.CPU} <= set(where) for where in await tiers(kv, chain))

        again = await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        assert again.token_ids == answer.token_ids == baseline.token_ids

        for _ in range(100):  # until the registry has a heartbeat's figures
            (info,) = [info for info in await kv.engines() if info.role == "storage"]
            used = {tier.name: tier.used_bytes for tier in info.tiers}
            if used.get("device") == size:
                break
            await asyncio.sleep(0.1)
        assert used["device"] == size

        evicted = await do(kv.evict(chain, tiers=[Tier.DEVICE], session=SESSION))
        assert evicted.counts() == {"removed": len(chain)}
        assert all(Tier.DEVICE not in where and Tier.CPU in where for where in await tiers(kv, chain))

    for _ in range(100):
        steps = {span.name for span in by_trace(read_spans(world.trace_file)).get(rank.trace_id or "", [])}
        if "kv.tier.load cpu→device" in steps:
            break
        await asyncio.sleep(0.1)
    assert {"kv.tier.load disk→cpu", "kv.tier.load cpu→device"} <= steps
