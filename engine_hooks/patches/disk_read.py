# SPDX-License-Identifier: Apache-2.0
"""A blocking read from disk returns a chunk that was read whole, or nothing.

LMCache 0.4.3/0.4.4 ignores short reads, returns an unread buffer for a missing file (and pops its entry without
lowering the quota), and raises KeyError for an entry that went while it read.

Threads: the forward thread; no I/O under a lock.
"""

from __future__ import annotations

import logging
from typing import Any

from semkv.consumers.storage import disk_entries, files
from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")


def _make(_current: AnyFunction) -> AnyFunction:
    def get_blocking(self: Any, key: Any) -> Any:
        """The chunk with a reference of the caller's, or None."""
        with self.disk_lock:
            meta = self.dict.get(key)
            if meta is None:
                return None
            meta.pin()
            self.cache_policy.update_on_hit(key, self.dict)
        memory_obj = None
        whole = False
        try:
            memory_obj = self.local_cpu_backend.allocate(meta.shape, meta.dtype, meta.fmt)
            if memory_obj is None:
                return None
            files.read_full(meta.path, memory_obj.byte_array, direct=self.use_odirect)
            memory_obj.metadata.cached_positions = meta.cached_positions
            whole = True
        except OSError as error:
            logger.warning("chunk %s cannot be read: %s", key.chunk_hash_hex, error)
            if isinstance(error, (FileNotFoundError, files.ShortFileError)):
                disk_entries.discard(self, key, meta)
        finally:
            if memory_obj is not None and not whole:
                memory_obj.ref_count_down()
            disk_entries.unpin(self, [meta])
        return memory_obj if whole else None

    return get_blocking


PATCH = Patch(
    name="disk_read",
    reason="a short or missing file is handed out as if it had been read",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.local_disk_backend:LocalDiskBackend.get_blocking",
            _make,
            frozenset({"dab51de40e6e1505"}),
        ),
    ),
)
