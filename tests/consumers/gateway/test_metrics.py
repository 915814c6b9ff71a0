# SPDX-License-Identifier: Apache-2.0
"""The gateway's figures of its commands and events: each counted once, as what it was, and losses seen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from semkv.bus import connect
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished, Heartbeat
from semkv.bus.status import HashesStatus
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import DOMAIN, Gateway
from tests.consumers.gateway.test_events import publish
from tests.consumers.rank.stand_in import CHUNK_BYTES, StandInStorage


async def lines_of(gateway: Gateway, *wanted: str) -> str:
    """The page, once it has all of these lines."""
    for _ in range(400):
        text = (await gateway.client.get("/metrics")).text
        if all(line in text for line in wanted):
            break
        await asyncio.sleep(0.05)
    for line in wanted:
        assert line in text, f"{line} is not in\n" + "\n".join(re.findall(r"^semkv.*[1-9]\S*$", text, re.M))
    return text


async def test_a_prefetch_that_nobody_waits_for_is_counted_when_it_ends(
    gateway: Gateway, rank_of: Callable[..., RankWorker]
) -> None:
    storage = StandInStorage(disk={1, 2})
    rank_of(storage)
    storage.gate.clear()
    try:
        answer = await gateway.post("prefetch", {"chunk_hashes": ["1", "2"], "lookup_id": "x"})
        assert answer.json()["status"] == "prefetch_started"
        assert 'op="prefetch"' not in (await gateway.client.get("/metrics")).text
    finally:
        storage.gate.set()
    text = await lines_of(
        gateway,
        'semkv_gateway_commands_total{op="prefetch",state="succeeded"} 1.0',
        'semkv_gateway_chunks_total{op="prefetch",status="loaded"} 2.0',
        f'semkv_gateway_moved_bytes_total{{op="prefetch",tier="cpu"}} {2.0 * CHUNK_BYTES}',
        'semkv_gateway_queue_seconds_count{op="prefetch"} 1.0',
        'semkv_gateway_run_seconds_count{op="prefetch"} 1.0',
    )
    assert "unanswered" not in text


async def test_a_dry_run_moves_nothing(gateway: Gateway, rank_of: Callable[..., RankWorker]) -> None:
    rank_of(StandInStorage(disk={1}))
    body = {"chunk_hashes": ["1"], "lookup_id": "x", "dry_run": True}
    assert (await gateway.post("prefetch?wait=20", body)).status_code == 200
    text = await lines_of(gateway, 'semkv_gateway_commands_total{op="dry_run",state="succeeded"} 1.0')
    assert "semkv_gateway_moved_bytes_total{" not in text


async def test_lost_events_are_counted_by_the_gaps_they_leave(gateway: Gateway, nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.url) as kv:
        await kv.session()  # makes the events stream
    about = {"tenant": "default", "domain": DOMAIN.fingerprint, "instance": "e0", "epoch": 5}

    def finished(seq: int) -> Finished:
        return Finished(
            **about, seq=seq, request_id="r", engine_request_id="r", finish_reason="length", prompt_tokens=1,
            generated_tokens=1, chunk_size=64, hashes_status=HashesStatus.KNOWN, arrived_at=1, finished_at=2,
        )  # fmt: skip

    await publish(nats_server.url, finished(1))
    await lines_of(gateway, 'semkv_events_total{type="finished"} 1.0')
    for event in (finished(4), Heartbeat(**about, last_seq=6), Heartbeat(**about, last_seq=6)):
        await publish(nats_server.url, event)
    text = await lines_of(gateway, 'semkv_events_lost_total{instance="e0"} 4.0')
    assert 'type="heartbeat"' not in text
