# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks in processes of their own: a real rank worker over a storage that only notes when it was called."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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
    """Every operation says when it was started, on the wall clock that all processes of the machine share."""

    def prefetch(self, hashes: tuple[int, ...], **_: Any) -> OpResult:
        started = time.time_ns()
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


class RankProcesses:
    """`count` ranks of one instance, spread over at most `processes` processes."""

    def __init__(self, url: str, count: int, processes: int = 8) -> None:
        groups = [list(range(count))[start::processes] for start in range(min(processes, count))]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench._ranks", url, str(count), *map(str, group)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for group in groups
        ]  # fmt: skip

    async def __aenter__(self) -> RankProcesses:
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


def serve(url: str, count: int, ranks: Sequence[int]) -> None:
    """What a process runs: its ranks, until its input ends."""
    workers = [
        RankWorker(BusSettings(url=url), RankIdentity("bench", rank, count, Role.STORAGE, DOMAIN), NotingStorage())
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
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])
