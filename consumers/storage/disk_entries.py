# SPDX-License-Identifier: Apache-2.0
"""The one place that adds and takes entries of LMCache's local disk backend, so that quota, usage and files agree.

`usage` and `current_cache_size` both count `meta.size` of every entry in `dict`; a write in flight has its size
reserved in `current_cache_size` only.

Threads: functions that end in `_locked` want `disk_lock` held by the caller; they do no I/O but a rename.
Errors: a missing file is no error (the caller is told).
"""

from __future__ import annotations

from typing import Any

from semkv.consumers.storage import files

_EVICT = "EVICT"
_ADMIT = "ADMIT"


def announce(backend: Any, key: Any, what: str) -> None:
    """Queue LMCache's own controller message (`ADMIT` or `EVICT`), if this deployment has a controller."""
    sender = getattr(backend, "batched_msg_sender", None)
    if sender is None:
        return
    from lmcache.v1.cache_controller.message import OpType

    sender.add_kv_op(op_type=getattr(OpType, what), key=key.chunk_hash)


def _count_down_locked(backend: Any, size: int, *, reserved_too: bool) -> None:
    backend.usage -= size
    if reserved_too:
        backend.current_cache_size -= size
    backend.stats_monitor.update_local_storage_usage(backend.usage)


def take_locked(
    backend: Any, key: Any, *, reserved_too: bool = True, forget_policy: bool = True
) -> tuple[Any, str | None]:
    """Take the entry of `key` out and rename its file away.

    Returns the entry (None if there was none) and the retired file to unlink after the lock (None if it was missing).
    """
    meta = backend.dict.pop(key, None)
    if meta is None:
        return None, None
    _count_down_locked(backend, meta.size, reserved_too=reserved_too)
    if forget_policy:
        backend.cache_policy.update_on_force_evict(key)
    retired = files.retire(meta.path)
    announce(backend, key, _EVICT)
    return meta, retired


def discard(backend: Any, key: Any, meta: Any) -> None:
    """Drop an entry whose file turned out missing or damaged, if it is still that very entry."""
    retired = None
    with backend.disk_lock:
        if backend.dict.get(key) is meta:
            _, retired = take_locked(backend, key)
    if retired is not None:
        files.unlink_all((retired,))


def unpin(backend: Any, metas: list[Any]) -> None:
    """Give back one pin of each of exactly these entries, whether or not they are still in the index."""
    with backend.disk_lock:
        for meta in metas:
            if meta.pin_count > 0:
                meta.unpin()


def make_room_locked(backend: Any, size: int) -> tuple[bool, list[str]]:
    """Take the oldest evictable entries until `size` fits; returns whether it fits and the files to unlink."""
    retired: list[str] = []
    if size > backend.max_cache_size:
        return False, retired
    while backend.current_cache_size + size > backend.max_cache_size:
        victims = backend.cache_policy.get_evict_candidates(backend.dict, num_candidates=1)
        if not victims:
            return False, retired
        for victim in victims:
            _, path = take_locked(backend, victim)
            if path is not None:
                retired.append(path)
    return True, retired


def add_locked(backend: Any, key: Any, meta: Any) -> None:
    """Add an entry whose size is reserved already and whose file is in place."""
    backend.dict[key] = meta
    backend.usage += meta.size
    backend.cache_policy.update_on_put(key)
    backend.stats_monitor.update_local_storage_usage(backend.usage)
    announce(backend, key, _ADMIT)
