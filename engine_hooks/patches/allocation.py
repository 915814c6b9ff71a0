# SPDX-License-Identifier: Apache-2.0
"""Allocation never spins on an event loop, and what can never fit evicts nothing.

LMCache 0.4.3/0.4.4 lets its remote connectors wait for memory in a loop on the storage loop, which stops the very work
that would free memory; and an object larger than the pool first evicts every chunk and then fails.

Threads: any.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")


def _bytes_wanted(shapes: Any, dtypes: Any) -> int:
    many = isinstance(shapes, (list, tuple)) and not (shapes and isinstance(shapes[0], int))
    pairs = zip(shapes, dtypes, strict=False) if many and isinstance(dtypes, (list, tuple)) else [(shapes, dtypes)]
    total = 0
    for shape, dtype in pairs:
        count = 1
        for extent in shape:
            count *= int(extent)
        total += count * int((dtype[0] if isinstance(dtype, (list, tuple)) else dtype).itemsize)
    return total


def _pool_bytes(backend: Any) -> int | None:
    buffer = getattr(backend.memory_allocator, "buffer", None)
    return None if buffer is None else int(buffer.numel()) * int(buffer.element_size())


def _on_event_loop() -> bool:
    return asyncio._get_running_loop() is not None


def _make(current: AnyFunction) -> AnyFunction:
    @functools.wraps(current)
    def allocate(
        self: Any, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> Any:
        pool = _pool_bytes(self)
        if pool is not None and _bytes_wanted(shapes, dtypes) > pool:
            logger.warning("a chunk of %d bytes can never fit a pool of %d", _bytes_wanted(shapes, dtypes), pool)
            return None
        return current(self, shapes, dtypes, fmt, eviction, busy_loop and not _on_event_loop())

    return allocate


def _make_batched(current: AnyFunction) -> AnyFunction:
    @functools.wraps(current)
    def batched_allocate(
        self: Any,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: Any = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> Any:
        return current(self, shapes, dtypes, batch_size, fmt, eviction, busy_loop and not _on_event_loop())

    return batched_allocate


_CPU = "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend."

PATCH = Patch(
    name="allocation",
    reason="waiting for memory on the storage loop stops the work that would free it",
    replacements=(
        Replacement(_CPU + "allocate", _make, frozenset({"1b4def691402ecee"})),
        Replacement(_CPU + "batched_allocate", _make_batched, frozenset({"769f0c2a661a7c45"})),
    ),
)
