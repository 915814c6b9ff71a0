# SPDX-License-Identifier: Apache-2.0
"""An asynchronous load from disk holds no lock on any error path and hands out no buffer that was not read whole.

LMCache 0.4.3/0.4.4 takes the disk lock by hand and leaves it taken when a key is gone or memory is short (every later
disk operation then hangs, and with it the storage loop), returns allocated buffers that were never read, pins the
buffer without ever unpinning it for loads that nobody retrieves, and unpins by key, which hits whatever entry has the
key then. Here each entry is pinned and unpinned by identity, buffers are protected by their one reference alone, and
the result is the leading run of chunks that were read whole; the entry of a file that is missing or damaged is
dropped. What was loaded becomes the youngest on disk with the prefix youngest of all, where LMCache leaves it oldest.

Threads: the coroutine runs on the storage loop, the reads on the disk backend's own threads; no I/O under a lock.
"""

from __future__ import annotations

import logging
from typing import Any

from semkv.consumers.storage import disk_entries, files
from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")

_Taken = list[tuple[Any, Any, Any]]


def _take(backend: Any, keys: list[Any]) -> _Taken:
    """Pin entries and allocate their buffers, up to the first that is gone or has no room."""
    taken: _Taken = []
    for key in keys:
        with backend.disk_lock:
            meta = backend.dict.get(key)
            if meta is None:
                break
            meta.pin()
        try:
            memory_obj = backend.local_cpu_backend.allocate(meta.shape, meta.dtype, meta.fmt, busy_loop=False)
        except Exception:
            disk_entries.unpin(backend, [meta])
            _give_back(backend, taken)
            raise
        if memory_obj is None:
            disk_entries.unpin(backend, [meta])
            logger.warning("no memory for chunk %s while loading from disk: the load stops there", key.chunk_hash_hex)
            break
        taken.append((key, meta, memory_obj))
    _refresh(backend, taken)
    return taken


def _refresh(backend: Any, taken: _Taken) -> None:
    """Make these the youngest, the prefix youngest of all: without it the rest is of no use."""
    with backend.disk_lock:
        for key, meta, _ in reversed(taken):
            if backend.dict.get(key) is meta:
                backend.cache_policy.update_on_hit(key, backend.dict)


def _give_back(backend: Any, taken: _Taken) -> None:
    for _, _, memory_obj in taken:
        memory_obj.ref_count_down()
    disk_entries.unpin(backend, [meta for _, meta, _ in taken])


def _read(backend: Any, taken: _Taken) -> list[Any]:
    """Read the files; returns the leading objects that are whole and releases the others."""
    whole: list[Any] = []
    try:
        for key, meta, memory_obj in taken:
            try:
                files.read_full(meta.path, memory_obj.byte_array, direct=backend.use_odirect)
            except OSError as error:
                logger.warning("chunk %s cannot be read: %s", key.chunk_hash_hex, error)
                if isinstance(error, (FileNotFoundError, files.ShortFileError)):
                    disk_entries.discard(backend, key, meta)
                break
            memory_obj.metadata.cached_positions = meta.cached_positions
            whole.append(memory_obj)
    finally:
        for _, _, memory_obj in taken[len(whole) :]:
            memory_obj.ref_count_down()
        disk_entries.unpin(backend, [meta for _, meta, _ in taken])
    return whole


def _make(_current: AnyFunction) -> AnyFunction:
    async def batched_get_non_blocking(
        self: Any, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Load the leading run of `keys` from disk."""
        taken = _take(self, keys)
        if not taken:
            return []
        started = False

        def work() -> list[Any]:
            nonlocal started
            started = True
            return _read(self, taken)

        try:
            loaded: list[Any] = await self.disk_worker.submit_task("prefetch", work)
        except BaseException:
            if not started:
                _give_back(self, taken)
            raise
        return loaded

    return batched_get_non_blocking


PATCH = Patch(
    name="disk_load",
    reason="error paths of the asynchronous disk load leave the disk lock taken and hand out unread buffers",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.local_disk_backend:LocalDiskBackend.batched_get_non_blocking",
            _make,
            frozenset({"81d612bc14342ca5"}),
        ),
    ),
)
