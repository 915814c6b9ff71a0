# SPDX-License-Identifier: Apache-2.0
"""Prefetch from disk to DDR beside a plain `preadv` of the same files, and beside LMCache's own read.

A real LMCache engine with chunks of 2, 8 and 16 MiB. The plain read fills preallocated, page-aligned memory with the
same open flags: one file after another, and as many at once as a prefetch reads. Rounds alternate, so that all see the
same machine; the ratio is of the medians. Warm files and O_DIRECT are measured apart.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from semkv.bus.status import State
from semkv.consumers.storage import LMCacheStorage, PrefixForest
from semkv.consumers.storage.readers import READERS
from semkv.engine_hooks.patches import apply_all
from tests.support.lmcache_engine import Rig, lmcache_engine

TOTAL_MIB = 64
CHUNK_MIB = (2, 8, 16)
TOKENS_PER_MIB = 2048


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _read(path: str, memory: memoryview, flags: int) -> None:
    descriptor = os.open(path, flags)
    done = 0
    while done < len(memory):
        done += os.preadv(descriptor, (memory[done:],), done)
    os.close(descriptor)


def _measure(rig: Rig, chunks: int, flags: int, rounds: int, pool: ThreadPoolExecutor) -> dict[str, float]:
    storage = LMCacheStorage(rig.engine, PrefixForest("default"))
    tokens = rig.tokens(chunks)
    hashes = rig.store(tokens)
    keys = rig.keys(tokens)
    metas = [rig.disk.dict[key] for key in keys]
    memory = memoryview(mmap.mmap(-1, chunks * rig.chunk_bytes))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))
    jobs = [
        (meta.path, memory[number * rig.chunk_bytes : (number + 1) * rig.chunk_bytes], flags)
        for number, meta in enumerate(metas)
    ]

    def in_turn() -> None:
        for job in jobs:
            _read(*job)

    def at_once() -> None:
        list(pool.map(lambda job: _read(*job), jobs))

    def prefetch() -> None:
        assert storage.prefetch(hashes).state is State.SUCCEEDED

    def own_read() -> None:
        for key, meta in zip(keys, metas, strict=True):
            rig.disk.load_bytes_from_disk(key, meta.path, meta.dtype, meta.shape, meta.fmt).ref_count_down()

    ways = {"preadv": in_turn, "preadv_at_once": at_once, "prefetch": prefetch, "lmcache": own_read}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            for key in keys:
                if key in rig.cpu.hot_cache:
                    rig.cpu.remove(key)
            times[name].append(_seconds(work))
    middle = {name: statistics.median(values) for name, values in times.items()}
    size = chunks * rig.chunk_bytes
    figures = {f"{name}_gb_s": size / seconds / 1e9 for name, seconds in middle.items()}
    return figures | {
        "prefetch_of_preadv": middle["preadv"] / middle["prefetch"],
        "prefetch_of_preadv_at_once": middle["preadv_at_once"] / middle["prefetch"],
        "prefetch_of_lmcache": middle["lmcache"] / middle["prefetch"],
    }


def run(rounds: int = 15, sizes: Sequence[int] = CHUNK_MIB) -> dict[str, float]:
    """Measure all ways of reading; returns figures by name."""
    apply_all()
    figures: dict[str, float] = {}
    for mib in sizes:
        for name, direct in (("warm", False), ("direct", True)):
            chunks = TOTAL_MIB // mib
            flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
            with (
                tempfile.TemporaryDirectory(prefix="semkv-bench-") as folder,
                ThreadPoolExecutor(READERS) as pool,
                lmcache_engine(
                    Path(folder),
                    chunk_size=mib * TOKENS_PER_MIB,
                    pool_chunks=3 * chunks,
                    disk_chunks=2 * chunks,
                    extra={"use_odirect": direct},
                ) as rig,
            ):
                row = _measure(rig, chunks, flags, rounds, pool)
            print(
                f"{mib:2} MiB {name:7} preadv {row['preadv_gb_s']:6.2f} GB/s, {READERS} at once "
                f"{row['preadv_at_once_gb_s']:6.2f} GB/s  prefetch {row['prefetch_gb_s']:6.2f} GB/s "
                f"({row['prefetch_of_preadv']:.0%}, {row['prefetch_of_preadv_at_once']:.0%})  "
                f"LMCache {row['lmcache_gb_s']:6.2f} GB/s"
            )
            figures |= {f"{name}.{mib}mib.{key}": value for key, value in row.items()}
    return figures
