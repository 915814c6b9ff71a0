# SPDX-License-Identifier: Apache-2.0
"""An asynchronous lookup refreshes what it hit, and refreshing tolerates what has gone.

LMCache 0.4.3/0.4.4 touches only in the synchronous lookup: with asynchronous loading its LRU is a FIFO, prefixes go
first, and the list of keys to touch grows for ever. A key that went meanwhile raises KeyError with the list uncleared.

Threads: the storage loop and the forward thread; each list is swapped out under its backend's lock.
"""

from __future__ import annotations

import functools
from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement


def _touch(backend: Any, lock: Any, index: Any) -> None:
    with lock:
        keys, backend.keys_in_request = backend.keys_in_request, []
        for key in reversed(keys):
            if key in index:
                backend.cache_policy.update_on_hit(key, index)


def _make_cpu(_current: AnyFunction) -> AnyFunction:
    def touch_cache(self: Any) -> None:
        """Make the keys of the last lookup the youngest, its prefix youngest of all."""
        _touch(self, self.cpu_lock, self.hot_cache)

    return touch_cache


def _make_disk(_current: AnyFunction) -> AnyFunction:
    def touch_cache(self: Any) -> None:
        """Make the keys of the last lookup the youngest, its prefix youngest of all."""
        _touch(self, self.disk_lock, self.dict)

    return touch_cache


def _make_contains(current: AnyFunction) -> AnyFunction:
    @functools.wraps(current)
    async def batched_async_contains(self: Any, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        hits: int = await current(self, lookup_id, keys, pin)
        if pin:
            self.touch_cache()
        return hits

    return batched_async_contains


_CPU = "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend."
_DISK = "lmcache.v1.storage_backend.local_disk_backend:LocalDiskBackend."

PATCH = Patch(
    name="touch",
    reason="with asynchronous loading the least recently used order is never updated",
    replacements=(
        Replacement(_CPU + "touch_cache", _make_cpu, frozenset({"5d1e183d69b9fce2"})),
        Replacement(_DISK + "touch_cache", _make_disk, frozenset({"14c2aebb3bfd1f13"})),
        Replacement(_CPU + "batched_async_contains", _make_contains, frozenset({"772ef61ce05b73ef"})),
        Replacement(_DISK + "batched_async_contains", _make_contains, frozenset({"7b4c34144fe7a00d"})),
    ),
)
