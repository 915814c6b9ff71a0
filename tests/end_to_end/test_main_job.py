# SPDX-License-Identifier: Apache-2.0
"""The main job on a real engine: hashes out, chunks to the SSD, evict, prefetch, a hit in DDR, the same output.

Each test fails when its part is taken out: the hooks (no hashes, no event), the subscriber (no live rank), or the
registration in the hot cache (nothing in DDR after a load).
"""

from __future__ import annotations

import asyncio

import pytest

from semkv.bus import KV, connect
from semkv.bus.hashes import parse_all, to_legacy
from semkv.bus.messages import Finished
from semkv.bus.status import HashesStatus, State, Tier
from semkv.cli.devengine.lmcache_hashes import LMCacheHasher
from semkv.cli.traces.store import by_trace, read_spans
from tests.end_to_end.conftest import CHUNK, DDR_CHUNKS, SESSION, World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOPIC = " ".join(f"note {number}: the memory of an agent remembers what was said." for number in range(40))
OTHER = " ".join(f"entry {number}: the quick brown fox jumps over the lazy dog." for number in range(170))


async def finished(kv: KV, world: World, ask, *, session: str = SESSION):
    """Ask, and wait for the event of that very request."""
    stream = kv.finished(session=session)

    async def matching(request_id: str) -> Finished:
        async for event in stream:
            if event.request_id == request_id:
                return event
        raise AssertionError("the stream ended")

    answer = await asyncio.to_thread(ask)
    answer_id = answer[0].id if isinstance(answer, tuple) else answer.id
    event = await asyncio.wait_for(matching(answer_id), 30)
    await stream.close()
    return answer, event


async def tiers(kv: KV, chain) -> list[tuple[str, ...]]:
    result = await (await kv.locate(chain)).result(30)
    assert result.state == State.SUCCEEDED, result.reason
    (rank,) = result.results
    return list(rank.chunk_tiers)


async def do(awaitable, timeout: float = 60):
    return await (await awaitable).result(timeout)


async def test_the_event_and_the_answer_carry_the_hashes_that_lmcache_computes(world):
    with LMCacheHasher(CHUNK) as lmcache:
        async with connect(world.nats.url) as kv:
            answer, event = await finished(kv, world, lambda: world.complete(TOPIC, session=SESSION))
            expected = lmcache.hashes(answer.prompt_token_ids)
            assert len(expected) == len(answer.prompt_token_ids) // CHUNK > 4
            assert answer.chunk_hashes == expected
            assert [to_legacy(chunk_hash) for chunk_hash in event.chunk_hashes] == expected
            assert event.hashes_status == HashesStatus.KNOWN
            assert event.prompt_tokens == len(answer.prompt_token_ids)

            (streamed, carriers), event = await finished(kv, world, lambda: world.stream(TOPIC, session=SESSION))
            expected = lmcache.hashes(streamed.prompt_token_ids)
            assert carriers == 1
            assert streamed.chunk_hashes == expected == [to_legacy(chunk_hash) for chunk_hash in event.chunk_hashes]


async def test_prefetch_brings_a_topic_back_from_the_ssd_and_the_next_request_hits(world):
    async with connect(world.nats.url) as kv:
        baseline = await asyncio.to_thread(world.complete, TOPIC, plain=True)
        answer, event = await finished(kv, world, lambda: world.complete(TOPIC, session=SESSION))
        chain = event.chunk_hashes
        assert answer.token_ids == baseline.token_ids

        # Another topic, larger than the pool: this one falls out of DDR onto the SSD.
        _, event = await finished(kv, world, lambda: world.complete(OTHER, session="other"), session="other")
        assert len(event.chunk_hashes) > DDR_CHUNKS
        assert all(Tier.DISK in where and Tier.CPU not in where for where in await tiers(kv, chain))

        evicted = await do(kv.evict(event.chunk_hashes, tiers=[Tier.CPU], session="other"))
        assert evicted.counts()["removed"] > 0
        assert all(Tier.CPU not in where for where in await tiers(kv, event.chunk_hashes))

        result = await do(kv.prefetch(chain, session=SESSION))
        (rank,) = result.results
        assert result.state == State.SUCCEEDED
        assert [str(status) for status in rank.chunk_status] == ["loaded"] * len(chain)
        assert sum(rank.bytes_by_tier.values()) == len(chain) * CHUNK * 1024
        assert rank.usable_prefix == len(chain)
        assert all(Tier.CPU in where for where in await tiers(kv, chain))

        again = await do(kv.prefetch(chain, session=SESSION))
        assert again.counts() == {"already_there": len(chain)}

        answer, event = await finished(kv, world, lambda: world.complete(TOPIC, session=SESSION))
        assert event.lmcache_hit_tokens >= len(chain) * CHUNK
        assert answer.token_ids == baseline.token_ids


async def test_a_request_that_loads_from_the_ssd_leaves_its_chunks_in_ddr(world):
    async with connect(world.nats.url) as kv:
        answer = await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        chain = parse_all(answer.chunk_hashes)
        await do(kv.evict(chain, tiers=[Tier.CPU], session=SESSION))
        assert all(where == (Tier.DISK,) for where in await tiers(kv, chain))
        again = await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        assert again.token_ids == answer.token_ids
        assert all(Tier.CPU in where for where in await tiers(kv, chain))


async def test_a_prefetch_of_chunks_that_are_nowhere_says_so(world):
    async with connect(world.nats.url) as kv:
        await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        result = await do(kv.prefetch([11, -12, 13], session=SESSION))
        assert result.state != State.SUCCEEDED
        assert result.counts() == {"missing": 1, "unreachable": 2}


async def test_one_trace_leads_from_the_agent_to_the_bytes(world, monkeypatch):
    monkeypatch.setenv("SEMKV_TRACE_FILE", str(world.trace_file))
    async with connect(world.nats.url) as kv:
        answer = await asyncio.to_thread(world.complete, TOPIC, session=SESSION)
        chain = parse_all(answer.chunk_hashes)
        await do(kv.evict(chain, tiers=[Tier.CPU], session=SESSION))
        result = await do(kv.prefetch(chain, session=SESSION))
        trace_id = result.results[0].trace_id

    def spans():
        return by_trace(read_spans(world.trace_file)).get(trace_id, [])

    for _ in range(100):
        if len({span.service for span in spans()}) > 1 and any(not span.parent_id for span in spans()):
            break
        await asyncio.sleep(0.1)
    found = {span.span_id: span for span in spans()}
    load = next(span for span in found.values() if span.name == "kv.tier.load disk→cpu")
    above = []
    while load.parent_id:
        load = found[load.parent_id]
        above.append(load.name.split(" ")[0])
    assert above == ["process", "publish"]
