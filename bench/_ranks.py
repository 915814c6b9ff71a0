# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks in processes of their own: a real rank worker over a storage that only notes when it was called.

Beside them, as what they are measured against: as many processes with nothing but a bare nats-py subscription each,
which notes when a message reached its callback.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import nats

from semkv.bus.domain import HashDomain
from semkv.bus.settings import BusSettings
from semkv.bus.status import ChunkStatus, Role, State
from semkv.consumers.rank import RankIdentity, RankWorker
from semkv.consumers.storage.ops import OpResult, TierInfo

DOMAIN = HashDomain(
    model="bench", revision="", chunk_size=256, save_unfull_chunk=False, kv_dtype="bfloat16", world_size=1,
    layout="bench", probe=1,
)  # fmt: skip
STARTED = "started_ns"


class NotingStorage:
    """Every operation says when it was started, on the wall clock that all processes of the machine share.

    A prefetch lasts `lasts_s`, in which it waits and does not work, as for a disk.
    """

    def __init__(self, lasts_s: float = 0.0) -> None:
        self._lasts_s = lasts_s

    def prefetch(self, hashes: tuple[int, ...], **_: Any) -> OpResult:
        started = time.time_ns()
        if self._lasts_s:
            time.sleep(self._lasts_s)
        return OpResult(State.SUCCEEDED, None, (ChunkStatus.LOADED,) * len(hashes), {STARTED: started}, len(hashes))

    def evict(self, hashes: tuple[int, ...], **_: Any) -> OpResult:
        return OpResult(State.SUCCEEDED, None, (ChunkStatus.REMOVED,) * len(hashes))

    def locate(self, hashes: tuple[int, ...], *, tenant: str) -> OpResult:
        return OpResult(State.SUCCEEDED, chunk_tiers=((),) * len(hashes))

    def retain(self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str) -> OpResult:
        return OpResult(State.SUCCEEDED)

    def release(self, client: str, session: str, tenant: str) -> OpResult:
        return OpResult(State.SUCCEEDED)

    def tiers(self) -> list[TierInfo]:
        return []


class _Processes:
    """`count` of something, spread over at most `processes` processes that run `serve` with these arguments."""

    def __init__(self, kind: str, url: str, count: int, lasts_s: float, processes: int = 8) -> None:
        groups = [list(range(count))[start::processes] for start in range(min(processes, count))]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench._ranks", kind, url, str(count), str(lasts_s), *map(str, group)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for group in groups
        ]  # fmt: skip

    async def __aenter__(self) -> _Processes:
        await asyncio.to_thread(self._await_ready)
        return self

    def _await_ready(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError("a simulated rank did not start")

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            await asyncio.to_thread(process.communicate, "")


class RankProcesses(_Processes):
    """`count` ranks of one instance."""

    def __init__(self, url: str, count: int, *, lasts_s: float = 0.0) -> None:
        super().__init__("ranks", url, count, lasts_s)


class BareProcesses(_Processes):
    """`count` bare subscribers to `bare`, each on a connection of its own, who tell `bare.heard` when."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__("bare", url, count, 0.0)


def serve_bare(url: str, count: int) -> None:
    """What a process of bare subscribers runs, until its input ends."""

    async def subscribe() -> Any:
        nc = await nats.connect(url)

        async def hear(msg: Any) -> None:
            await nc.publish("bare.heard", str(time.time_ns()).encode())

        await nc.subscribe("bare", cb=hear)
        await nc.flush()
        return nc

    async def main() -> None:
        clients = [await subscribe() for _ in range(count)]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for nc in clients:
            await nc.close()

    run_fast(main)


def serve(url: str, count: int, lasts_s: float, ranks: Sequence[int]) -> None:
    """What a process of ranks runs, until its input ends."""
    workers = [
        RankWorker(
            BusSettings(url=url), RankIdentity("bench", rank, count, Role.STORAGE, DOMAIN), NotingStorage(lasts_s)
        )
        for rank in ranks
    ]
    for worker in workers:
        worker.start()
    if all(worker.wait_ready(60) for worker in workers):
        print("ready", flush=True)
    sys.stdin.read()
    for worker in workers:
        worker.stop(2)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(values: Sequence[float]) -> tuple[float, float]:
    """(p50, p99)"""
    return statistics.median(values), percentile(values, 0.99)


def run_fast(work: Callable[[], Awaitable[Any]]) -> Any:
    """Runs on uvloop where there is one, as ranks do."""

    async def main() -> Any:
        return await work()

    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())


if __name__ == "__main__":
    _kind, _url, _count, _lasts, *_members = sys.argv[1:]
    if _kind == "bare":
        serve_bare(_url, len(_members))
    else:
        serve(_url, int(_count), float(_lasts), [int(member) for member in _members])
