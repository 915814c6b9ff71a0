# SPDX-License-Identifier: Apache-2.0
"""The DDR tier: holding chunks without pinning them, taking them out, and finding room.

Holding is one reference, never a pin: LMCache's pin monitor gives pins away after a while. Taking out is LMCache's own
removal plus its policy's, in one critical section, and only of what nobody uses.

Threads: any; every function takes `cpu_lock` itself and does no I/O under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from semkv.bus.status import ChunkStatus

_VICTIM_TRIES = 4
_REFILLS = 64


def hold(backend: Any, key: Any) -> Any:
    """A reference to the valid hot-cache object of `key`, touched; None if there is none.

    An entry whose memory is freed already is dropped here, without a release.
    """
    with backend.cpu_lock:
        memory_obj = backend.hot_cache.get(key)
        if memory_obj is None:
            return None
        if not memory_obj.is_valid():
            backend.hot_cache.pop(key)
            backend.cache_policy.update_on_force_evict(key)
            return None
        memory_obj.ref_count_up()
        backend.cache_policy.update_on_hit(key, backend.hot_cache)
        return memory_obj


def register(backend: Any, key: Any, memory_obj: Any) -> Any:
    """Put a freshly loaded object, of which the caller has one reference, into the hot cache.

    Returns the object that is there afterwards, with one reference of the caller's; another one if it was faster. None
    if it went again at once: then the caller's object is released.
    """
    backend.submit_put_task(key, memory_obj)
    with backend.cpu_lock:
        present = backend.hot_cache.get(key)
        if present is not memory_obj and present is not None:
            present.ref_count_up()
    if present is memory_obj:
        return memory_obj
    memory_obj.ref_count_down()
    return present


def remove(backend: Any, key: Any) -> tuple[ChunkStatus, int]:
    """Take one chunk out of the hot cache if nobody uses it; what happened and the bytes freed."""
    with backend.cpu_lock:
        memory_obj = backend.hot_cache.get(key)
        if memory_obj is None:
            return ChunkStatus.ABSENT, 0
        if not memory_obj.is_valid():
            backend.hot_cache.pop(key)
            backend.cache_policy.update_on_force_evict(key)
            return ChunkStatus.ABSENT, 0
        if not memory_obj.can_evict:
            return ChunkStatus.IN_USE, 0
        size = int(memory_obj.get_physical_size())
        backend.remove(key, force=False)
        backend.cache_policy.update_on_force_evict(key)
        return ChunkStatus.REMOVED, size


def _oldest_first(backend: Any) -> Iterator[Any]:
    # Asking LFU for candidates already takes them off its books, so its order is read here instead.
    buckets = getattr(backend.cache_policy, "freq_to_keys", None)
    if buckets is not None:
        for bucket in buckets.values():
            yield from bucket
    elif type(backend.cache_policy).__name__ == "MRUCachePolicy":
        yield from reversed(backend.hot_cache)
    else:
        yield from backend.hot_cache


class Room:
    """Finds memory for one operation's loads, and whom to take it from.

    `allowed` says which keys may go at all; among them those go first for which `better` is true. The order is read
    once and used up lazily, so that the lock is held for one removal at a time, however many chunks there are.
    """

    def __init__(self, backend: Any, *, allowed: Callable[[Any], bool], better: Callable[[Any], bool]) -> None:
        self._backend = backend
        self._allowed = allowed
        self._better = better
        self._victims: list[Any] = []
        self._refills = 0

    def allocate(self, shape: Any, dtype: Any, fmt: Any) -> Any:
        """A new object, after freeing at most a few victims; None if there is no room."""
        memory_obj = self._backend.allocate(shape, dtype, fmt, eviction=False, busy_loop=False)
        for _ in range(_VICTIM_TRIES):
            if memory_obj is not None or not self._free_one():
                break
            memory_obj = self._backend.allocate(shape, dtype, fmt, eviction=False, busy_loop=False)
        return memory_obj

    def _refill(self) -> bool:
        if self._refills >= _REFILLS:
            return False
        self._refills += 1
        with self._backend.cpu_lock:
            order = list(_oldest_first(self._backend))
        first: list[Any] = []
        second: list[Any] = []
        for key in order:
            if self._allowed(key):
                (first if self._better(key) else second).append(key)
        self._victims = (first + second)[::-1]
        return bool(self._victims)

    def _free_one(self) -> bool:
        while self._victims or self._refill():
            key = self._victims.pop()
            if self._allowed(key) and remove(self._backend, key)[0] is ChunkStatus.REMOVED:
                return True
        return False


def settle(backend: Any, chain: Sequence[tuple[int, Any]], held: dict[int, Any]) -> dict[int, bool]:
    """Look once more at every chunk of `chain` (index, key) and let go of what is held; which are there and valid.

    One critical section: what it returns was true of all chunks at one instant. The chain is touched in reverse, so
    that its head is the youngest.
    """
    present: dict[int, bool] = {}
    with backend.cpu_lock:
        for index, key in reversed(chain):
            memory_obj = backend.hot_cache.get(key)
            mine = held.get(index)
            there = memory_obj is not None and memory_obj.is_valid() and (mine is None or mine is memory_obj)
            present[index] = there
            if there:
                backend.cache_policy.update_on_hit(key, backend.hot_cache)
        for memory_obj in held.values():
            memory_obj.ref_count_down()
        held.clear()
    return present
