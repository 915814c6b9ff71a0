# SPDX-License-Identifier: Apache-2.0
"""How long from a client's call to the operation on the ranks, and how it grows with ranks and with agents.

Ranks are real rank workers in processes of their own, over a storage that notes when it was called and then waits, as a
load does for the disk; the latency counts until the slowest rank has started. It is set against two things measured in
the same rounds: a bare nats-py round trip between two connections of this process (the target's measure), and a bare
nats-py publish to as many processes as there are ranks, until the slowest has it in its callback: what any fan-out over
NATS costs on this machine, where the ranks share its cores.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import nats

from bench._ranks import STARTED, BareProcesses, RankProcesses, run_fast, summary
from semkv.bus import KV, connect
from semkv.bus.embedded import EmbeddedServer

RANKS = (1, 4, 8, 16, 64)
AGENTS = (1, 10, 100, 1000)
ROUNDS = 200
HASHES = tuple(range(64))
AT_ONCE = 8
LASTS_S = 0.005


async def _one(kv: KV) -> float:
    """Milliseconds from the call until the last rank's operation started."""
    start = time.time_ns()
    handle = await kv.prefetch(HASHES)
    outcome = await handle.result(60)
    if outcome.unanswered:
        raise RuntimeError(outcome.reason)
    return (max(result.bytes_by_tier[STARTED] for result in outcome.results) - start) / 1e6


class _FanOut:
    """A bare publish to everybody who is there."""

    def __init__(self, nc: Any, count: int) -> None:
        self._nc = nc
        self._count = count
        self._heard: list[int] = []
        self._all = asyncio.Event()

    async def start(self) -> None:
        await self._nc.subscribe("bare.heard", cb=self._hear)
        await self._nc.flush()

    async def _hear(self, msg: Any) -> None:
        self._heard.append(int(msg.data))
        if len(self._heard) == self._count:
            self._all.set()

    async def once(self) -> float:
        """Milliseconds from the publish until the slowest subscriber has it."""
        self._heard.clear()
        self._all.clear()
        start = time.time_ns()
        await self._nc.publish("bare", b"x" * 600)
        await asyncio.wait_for(self._all.wait(), 60)
        return (max(self._heard) - start) / 1e6


async def _ranks(url: str, count: int) -> dict[str, float]:
    nc, other = await nats.connect(url), await nats.connect(url)

    async def echo(msg: Any) -> None:
        await other.publish(msg.reply, msg.data)

    await other.subscribe("echo", cb=echo)
    await other.flush()
    fan_out = _FanOut(nc, count)
    await fan_out.start()
    latency: list[float] = []
    bare: list[float] = []
    fans: list[float] = []
    async with connect(url) as kv:
        while len(await kv.engines()) < count:  # noqa: ASYNC110 - ranks come one by one
            await asyncio.sleep(0.05)
        for number in range(ROUNDS + 10):
            start = time.perf_counter_ns()
            await nc.request("echo", b"x" * 600, timeout=10)
            trip = (time.perf_counter_ns() - start) / 1e6
            fan = await fan_out.once()
            started = await _one(kv)
            if number >= 10:
                bare.append(trip)
                fans.append(fan)
                latency.append(started)
    await nc.close()
    await other.close()
    p50, p99 = summary(latency)
    trip, fan = statistics.median(bare), statistics.median(fans)
    print(
        f"{count:>6} ranks   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   bare round trip {trip:5.2f} ms   x{p50 / trip:.1f}"
        f"   bare fan-out {fan:5.2f} ms   x{p50 / fan:.1f}"
    )
    key = f"{count}_ranks"
    return {
        f"{key}_p50_ms": p50,
        f"{key}_p99_ms": p99,
        f"{key}_x_bare_round_trip": p50 / trip,
        f"{key}_bare_fan_out_ms": fan,
        f"{key}_x_bare_fan_out": p50 / fan,
    }


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
        async with (
            EmbeddedServer() as server,
            RankProcesses(server.url, count, lasts_s=LASTS_S),
            BareProcesses(server.url, count),
        ):
            figures |= await _ranks(server.url, count)
    async with EmbeddedServer() as server, RankProcesses(server.url, 1):
        for count in AGENTS:
            figures |= await _agents(server.url, count)
    return figures


def run() -> dict[str, Any]:
    """Prints the tables; the figures of interest are `*_x_bare_round_trip`."""
    figures: dict[str, Any] = run_fast(_measure)
    return figures
