# SPDX-License-Identifier: Apache-2.0
"""What a prefetch would do, without doing it.

Threads: any; each lock is taken for one look-up only. Errors: those of the remote store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semkv.bus.status import ChunkStatus, Order, Tier
from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.ops import OpResult
from semkv.consumers.storage.verdict import end_state, leading


def dry_run(
    backends: Backends,
    visible: Callable[[int], bool],
    *,
    hashes: tuple[int, ...],
    order: Order,
    budget_bytes: int | None,
    size_of: Callable[[Any], tuple[Tier, int] | None],
    rate: Callable[[Tier], float | None],
) -> OpResult:
    """What a prefetch would do now, without touching, pinning or loading anything.

    `rate` gives bytes per second seen on a tier so far, for the estimate of the time; None where nothing was loaded
    yet.
    """
    cpu, cap = backends.cpu, backends.pool_bytes() // 2
    statuses: dict[int, ChunkStatus] = {}
    sizes: dict[Tier, int] = {}
    rest: ChunkStatus | None = None
    for chunk_hash, key in zip(hashes, backends.keys(hashes), strict=True):
        if chunk_hash in statuses:
            continue
        if rest is not None:
            statuses[chunk_hash] = rest
            continue
        with cpu.cpu_lock:
            memory_obj = cpu.hot_cache.get(key)
            hot_there = memory_obj is not None and memory_obj.is_valid()
        found = size_of(key) if visible(chunk_hash) and not hot_there else None
        if hot_there and visible(chunk_hash):
            statuses[chunk_hash] = ChunkStatus.ALREADY_THERE
        elif found is None:
            statuses[chunk_hash] = ChunkStatus.MISSING
            rest = ChunkStatus.UNREACHABLE if order is Order.PREFIX else None
        elif budget_bytes is not None and sum(sizes.values()) + found[1] > budget_bytes:
            statuses[chunk_hash] = rest = ChunkStatus.NOT_TRIED
        elif sum(sizes.values()) + found[1] > cap:
            statuses[chunk_hash], rest = ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED
        else:
            statuses[chunk_hash] = ChunkStatus.LOADED
            sizes[found[0]] = sizes.get(found[0], 0) + found[1]
    requested = tuple(statuses[chunk_hash] for chunk_hash in hashes)
    loads = sum(status is ChunkStatus.LOADED for status in statuses.values())
    parts = [f"dry run: {loads} chunks of {sum(sizes.values())} bytes would be loaded"]
    rates = {tier: rate(tier) for tier in sizes}
    if sizes and all(rates.values()):
        seconds = sum(size / (rates[tier] or 1.0) for tier, size in sizes.items())
        parts.append(f"in about {seconds * 1000:.1f} ms")
    elif sizes:
        parts.append("in a time not known yet: nothing was loaded so far")
    return OpResult(
        state=end_state(requested),
        reason=" ".join(parts),
        chunk_status=requested,
        bytes_by_tier={str(tier): size for tier, size in sizes.items()},
        usable_prefix=leading(requested),
    )
