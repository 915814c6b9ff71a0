# SPDX-License-Identifier: Apache-2.0
"""How long from a client's call to the operation on the ranks, and how it grows with ranks and with agents.

Ranks are real rank workers in processes of their own, over a storage that notes when it was called; the latency counts
until the slowest rank has started. It is set against a bare nats-py round trip, measured in the same rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import nats

from bench._ranks import STARTED, RankProcesses, run_fast, summary
from semkv.bus import KV, connect
from semkv.bus.embedded import EmbeddedServer

RANKS = (1, 4, 8, 16, 64)
AGENTS = (1, 10, 100, 1000)
ROUNDS = 200
HASHES = tuple(range(64))
AT_ONCE = 8


async def _one(kv: KV) -> float:
    """Milliseconds from the call until the last rank's operation started."""
    start = time.time_ns()
    handle = await kv.prefetch(HASHES)
    outcome = await handle.result(60)
    if outcome.unanswered:
        raise RuntimeError(outcome.reason)
    return (max(result.bytes_by_tier[STARTED] for result in outcome.results) - start) / 1e6


async def _ranks(url: str, count: int) -> dict[str, float]:
    nc, other = await nats.connect(url), await nats.connect(url)

    async def echo(msg: Any) -> None:
        await other.publish(msg.reply, msg.data)

    await other.subscribe("echo", cb=echo)
    await other.flush()
    latency: list[float] = []
    bare: list[float] = []
    async with connect(url) as kv:
        while len(await kv.engines()) < count:  # noqa: ASYNC110 - ranks come one by one
            await asyncio.sleep(0.05)
        for number in range(ROUNDS + 10):
            start = time.perf_counter_ns()
            await nc.request("echo", b"x" * 600, timeout=10)
            trip = (time.perf_counter_ns() - start) / 1e6
            started = await _one(kv)
            if number >= 10:
                bare.append(trip)
                latency.append(started)
    await nc.close()
    await other.close()
    p50, p99 = summary(latency)
    trip = statistics.median(bare)
    print(
        f"{count:>6} ranks   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   bare round trip {trip:5.2f} ms   x{p50 / trip:.1f}"
    )
    key = f"{count}_ranks"
    return {f"{key}_p50_ms": p50, f"{key}_p99_ms": p99, f"{key}_x_bare_round_trip": p50 / trip}


async def _agents(url: str, count: int) -> dict[str, float]:
    clients = [await connect(url) for _ in range(count)]
    turns = asyncio.Semaphore(AT_ONCE)
    latency: list[float] = []

    async def act(kv: KV) -> None:
        async with turns:
            latency.append(await _one(kv))

    rounds = max(1, ROUNDS // count)
    await act(clients[0])
    latency.clear()
    begin = time.perf_counter()
    for _ in range(rounds):
        await asyncio.gather(*(act(kv) for kv in clients))
    rate = len(latency) / (time.perf_counter() - begin)
    p50, p99 = summary(latency)
    print(
        f"{count:>6} agents  p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   {rate:7.0f} commands/s, {AT_ONCE} at once, 1 rank"
    )
    for kv in clients:
        await kv.close()
    key = f"{count}_agents"
    return {f"{key}_p50_ms": p50, f"{key}_p99_ms": p99, f"{key}_commands_per_s": rate}


async def _measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    for count in RANKS:
        async with EmbeddedServer() as server, RankProcesses(server.url, count):
            figures |= await _ranks(server.url, count)
    async with EmbeddedServer() as server, RankProcesses(server.url, 1):
        for count in AGENTS:
            figures |= await _agents(server.url, count)
    return figures


def run() -> dict[str, Any]:
    """Prints the tables; the figures of interest are `*_x_bare_round_trip`."""
    figures: dict[str, Any] = run_fast(_measure)
    return figures
