# SPDX-License-Identifier: Apache-2.0
"""The prefix forest at a million chunks: an evict's decision, bytes per chunk, and turns a second.

Sessions of 512 chunks that share a prefix of 32; a turn adds 16 chunks to a chain of 512. Memory is what Python's own
allocator and the arrays grew by.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

from semkv.consumers.storage import PrefixForest

CHAIN, PREFIX, NEW = 512, 32, 16


def _chain(session: int, length: int = CHAIN) -> tuple[int, ...]:
    scattered = (0x9E3779B97F4A7C15 * (session * 4096 + position + 1) for position in range(PREFIX, length))
    return (*range(1, PREFIX + 1), *((value & (1 << 64) - 1) - (1 << 63) for value in scattered))


def run(sessions: int = 2100) -> dict[str, float]:
    """Fill, then measure; returns figures by name."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    forest = PrefixForest("default")
    for session in range(sessions):
        forest.record_lookup("default", f"s{session}", _chain(session), f"r{session}", running=False)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    chunks = forest.stats()["chunks"]
    wanted = [_chain(number) for number in range(0, sessions, max(1, sessions // 50))]
    times = []
    for number, chain in enumerate(wanted):
        begin = time.perf_counter()
        forest.shared("default", f"s{number * max(1, sessions // 50)}", chain)
        times.append(time.perf_counter() - begin)
    turns = 0
    spent = 0.0
    for session in range(min(sessions, 500)):
        longer = _chain(session, CHAIN + NEW)
        begin = time.perf_counter()
        forest.record_lookup("default", f"s{session}", longer, f"t{session}")
        forest.finished((f"t{session}",))
        spent += time.perf_counter() - begin
        turns += 1
    figures = {
        "chunks": float(chunks),
        "bytes_per_chunk": used / chunks,
        "decision_512_ms_p50": statistics.median(times) * 1000,
        "decision_512_ms_max": max(times) * 1000,
        "turns_per_s": turns / spent,
    }
    print(
        f"{chunks} chunks, {figures['bytes_per_chunk']:.0f} B each; decision for {CHAIN} chunks "
        f"p50 {figures['decision_512_ms_p50']:.2f} ms, max {figures['decision_512_ms_max']:.2f} ms; "
        f"{figures['turns_per_s']:.0f} turns/s of {NEW} new chunks"
    )
    return figures
