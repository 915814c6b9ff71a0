# SPDX-License-Identifier: Apache-2.0
"""A put to disk ends with the chunk stored once, or with nothing left behind.

LMCache 0.4.3/0.4.4 rewrites a chunk that is on disk already and counts its quota again; a failed or refused write keeps
the DDR reference, the `put_tasks` entry and the quota for ever; usage is counted without a lock and before the write.
Here a put of a known key returns, the file appears under its name together with its entry, and every way out releases
the reference, the reservation and the task.

Threads: submitting on the forward thread, writing on the disk backend's threads; no I/O but a rename under `disk_lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semkv.consumers.storage import disk_entries, files
from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")

_Callback = Callable[[Any], None] | None


def _reserve(backend: Any, key: Any, size: int) -> bool:
    """Claim the key and its space; False if it is there, on its way, or does not fit."""
    worker = backend.disk_worker
    with backend.disk_lock:
        if key in backend.dict:
            return False
        with worker.put_lock:
            if key in worker.put_tasks:
                return False
            worker.put_tasks.append(key)
        fits, retired = disk_entries.make_room_locked(backend, size)
        if fits:
            backend.current_cache_size += size
    files.unlink_all(retired)
    if not fits:
        worker.remove_put_task(key)
        logger.warning("no room on disk for chunk %s", key.chunk_hash_hex)
    return fits


def _cancel(backend: Any, key: Any, size: int) -> None:
    with backend.disk_lock:
        backend.current_cache_size -= size
    backend.disk_worker.remove_put_task(key)


def _make_submit(_current: AnyFunction) -> AnyFunction:
    def submit_put_task(self: Any, key: Any, memory_obj: Any, on_complete_callback: _Callback = None) -> None:
        """Start writing a chunk, unless it is on disk or on its way there."""
        size = memory_obj.get_physical_size()
        if not _reserve(self, key, size):
            return
        memory_obj.ref_count_up()
        writing = self.disk_worker.submit_task(
            "put",
            self.async_save_bytes_to_disk,
            key=key,
            memory_obj=memory_obj,
            on_complete_callback=on_complete_callback,
        )
        try:
            asyncio.run_coroutine_threadsafe(writing, self.loop)
        except RuntimeError as error:
            writing.close()
            memory_obj.ref_count_down()
            _cancel(self, key, size)
            logger.warning("chunk %s is not written: %s", key.chunk_hash_hex, error)

    return submit_put_task


def _make_save(_current: AnyFunction) -> AnyFunction:
    from lmcache.utils import DiskCacheMetadata

    def store(backend: Any, key: Any, memory_obj: Any, size: int) -> None:
        path = backend._key_to_path(key)
        temporary = files.temporary_name(path)
        files.write_full(temporary, memory_obj.byte_array, direct=backend.use_odirect)
        meta = memory_obj.metadata
        entry = DiskCacheMetadata(path, size, meta.shape, meta.dtype, meta.cached_positions, meta.fmt, 0)
        try:
            with backend.disk_lock:
                Path(temporary).replace(path)
                disk_entries.add_locked(backend, key, entry)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise

    def async_save_bytes_to_disk(self: Any, key: Any, memory_obj: Any, on_complete_callback: _Callback = None) -> None:
        """Write a chunk whose key and space are reserved."""
        size = memory_obj.get_physical_size()
        stored = False
        try:
            store(self, key, memory_obj, size)
            stored = True
        except Exception as error:
            logger.warning("chunk %s is not written: %s: %s", key.chunk_hash_hex, type(error).__name__, error)
        finally:
            memory_obj.ref_count_down()
            if stored:
                self.disk_worker.remove_put_task(key)
            else:
                _cancel(self, key, size)
        if stored and on_complete_callback is not None:
            try:
                on_complete_callback(key)
            except Exception as error:
                logger.warning("the callback for chunk %s failed: %s", key.chunk_hash_hex, error)

    return async_save_bytes_to_disk


_DISK = "lmcache.v1.storage_backend.local_disk_backend:LocalDiskBackend."

PATCH = Patch(
    name="disk_put",
    reason="puts to disk count quota twice, and failed ones keep memory, quota and their task for ever",
    replacements=(
        Replacement(_DISK + "submit_put_task", _make_submit, frozenset({"bc85054e8bd01be1"})),
        Replacement(_DISK + "async_save_bytes_to_disk", _make_save, frozenset({"82b00b1c5585ee3e"})),
    ),
)
