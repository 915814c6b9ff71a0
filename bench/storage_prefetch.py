# SPDX-License-Identifier: Apache-2.0
"""Prefetch from disk to DDR beside a plain `preadv` of the same files, and beside LMCache's own read.

A real LMCache engine with chunks of 2 MiB. The plain read fills preallocated, page-aligned memory, one file after
another, with the same open flags. Rounds alternate, so that both see the same machine; the ratio is of the medians.
Warm files and O_DIRECT are measured apart.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from semkv.bus.status import State
from semkv.consumers.storage import LMCacheStorage, PrefixForest
from semkv.engine_hooks.patches import apply_all
from tests.support.lmcache_engine import Rig, lmcache_engine

CHUNKS = 32
CHUNK_TOKENS = 4096


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _plain(paths: list[str], memory: memoryview, size: int, flags: int) -> None:
    for number, path in enumerate(paths):
        descriptor = os.open(path, flags)
        done = 0
        while done < size:
            done += os.preadv(descriptor, (memory[number * size + done : (number + 1) * size],), done)
        os.close(descriptor)


def _measure(rig: Rig, flags: int, rounds: int) -> dict[str, float]:
    storage = LMCacheStorage(rig.engine, PrefixForest("default"))
    tokens = rig.tokens(CHUNKS)
    hashes = rig.store(tokens)
    keys = rig.keys(tokens)
    metas = [rig.disk.dict[key] for key in keys]
    memory = memoryview(mmap.mmap(-1, CHUNKS * rig.chunk_bytes))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))
    times: dict[str, list[float]] = {"preadv": [], "prefetch": [], "lmcache": []}

    def prefetch() -> None:
        assert storage.prefetch(hashes).state is State.SUCCEEDED

    def own_read() -> None:
        for key, meta in zip(keys, metas, strict=True):
            rig.disk.load_bytes_from_disk(key, meta.path, meta.dtype, meta.shape, meta.fmt).ref_count_down()

    for _ in range(rounds):
        rig.drop_from_ddr(tokens)
        times["prefetch"].append(_seconds(prefetch))
        rig.drop_from_ddr(tokens)
        times["preadv"].append(_seconds(lambda: _plain([meta.path for meta in metas], memory, rig.chunk_bytes, flags)))
        times["lmcache"].append(_seconds(own_read))
    middle = {name: statistics.median(values) for name, values in times.items()}
    size = CHUNKS * rig.chunk_bytes
    return {
        "preadv_gb_s": size / middle["preadv"] / 1e9,
        "prefetch_gb_s": size / middle["prefetch"] / 1e9,
        "lmcache_gb_s": size / middle["lmcache"] / 1e9,
        "prefetch_of_preadv": middle["preadv"] / middle["prefetch"],
        "prefetch_of_lmcache": middle["lmcache"] / middle["prefetch"],
    }


def run(rounds: int = 15) -> dict[str, float]:
    """Measure both ways of reading; returns figures by name."""
    apply_all()
    figures: dict[str, float] = {}
    for name, direct in (("warm", False), ("direct", True)):
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        with (
            tempfile.TemporaryDirectory(prefix="semkv-bench-") as folder,
            lmcache_engine(
                Path(folder),
                chunk_size=CHUNK_TOKENS,
                pool_chunks=3 * CHUNKS,
                disk_chunks=2 * CHUNKS,
                extra={"use_odirect": direct},
            ) as rig,
        ):
            row = _measure(rig, flags, rounds)
        print(
            f"{name:7} preadv {row['preadv_gb_s']:6.2f} GB/s  prefetch {row['prefetch_gb_s']:6.2f} GB/s "
            f"({row['prefetch_of_preadv']:.0%} of preadv)  LMCache {row['lmcache_gb_s']:6.2f} GB/s"
        )
        figures |= {f"{name}.{key}": value for key, value in row.items()}
    return figures
