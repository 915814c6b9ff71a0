# SPDX-License-Identifier: Apache-2.0
"""Many small calls, each on a connection of its own, as today's agents make them: every one is answered truthfully."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from semkv.consumers.gateway.settings import GatewaySettings
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import Gateway, running
from tests.consumers.rank.stand_in import StandInStorage

CALLS = 1000
AT_ONCE = 25


async def call(gateway: Gateway, path: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    """One call on a connection of its own, closed by us after the answer."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /memory/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    header, _, content = answer.partition(b"\r\n\r\n")
    return int(header.split(b" ", 2)[1]), json.loads(content)


async def test_each_of_many_calls_is_answered_once_and_counted(
    gateway: Gateway, rank_of: Callable[..., RankWorker]
) -> None:
    storage = StandInStorage(disk=set(range(1, CALLS + 1)))
    rank_of(storage)
    numbers = iter(range(1, CALLS + 1))
    found: Counter[tuple[int, object]] = Counter()
    ids = set()

    async def worker() -> None:
        for number in numbers:
            body = {"chunk_hashes": [f"{number:x}"], "lookup_id": "turn_prefetch"}
            status, answer = await call(gateway, "prefetch", body)
            found[status, answer["status"]] += 1
            ids.add(answer["command_id"])

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    assert found == {(200, "prefetch_started"): CALLS} and len(ids) == CALLS
    status, answer = await call(gateway, "evict?wait=60", {"chunk_hashes": [f"{n:x}" for n in range(1, CALLS + 1)]})
    assert status == 200 and answer["num_evicted"] == CALLS
    assert len(storage.loads) == CALLS, "each was loaded once"


async def test_too_many_at_once_are_refused_and_the_rest_is_served(
    settings: GatewaySettings, rank_of: Callable[..., RankWorker]
) -> None:
    storage = StandInStorage(cpu={1})
    rank_of(storage)
    storage.gate.clear()
    async with running(replace(settings, requests=2)) as gateway:
        try:
            held = [asyncio.create_task(call(gateway, "evict", {"chunk_hashes": ["1"]})) for _ in range(2)]
            await asyncio.to_thread(storage.entered.acquire)
            refused = 200
            for _ in range(200):
                refused, answer = await call(gateway, "locate", {"chunk_hashes": ["1"]})
                if refused == 429:
                    break
                await asyncio.sleep(0.01)
            assert refused == 429 and "too many requests" in str(answer["error"])
        finally:
            storage.gate.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        status, _ = await call(gateway, "locate", {"chunk_hashes": ["1"]})
        assert status == 200


async def test_a_rank_that_dies_meanwhile_is_named(gateway: Gateway, rank_of: Callable[..., RankWorker]) -> None:
    storage = StandInStorage(cpu={1})
    worker = rank_of(storage)
    storage.gate.clear()
    try:
        going = asyncio.create_task(gateway.post("evict?wait=3", {"chunk_hashes": ["1"]}))
        await asyncio.to_thread(storage.entered.acquire)
        await asyncio.to_thread(worker.stop, 0.5)
        answer = await asyncio.wait_for(going, 60)
    finally:
        storage.gate.set()
    # Whatever it said on its way out, it is not called a success.
    assert answer.status_code in {502, 504}, answer.text
    assert answer.json()["ranks"][0]["instance"] == "e0"
