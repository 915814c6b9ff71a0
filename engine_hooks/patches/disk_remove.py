# SPDX-License-Identifier: Apache-2.0
"""Removing a disk chunk tolerates a missing file, gives its quota back, and never leaves the lock taken.

LMCache 0.4.3/0.4.4 raises FileNotFoundError with `disk_lock` taken (and, during disk LRU, out of the forward thread),
and a forced removal lowers `usage` but not `current_cache_size`, until nothing can be stored any more.

Threads: any. With `force` the lock is taken here and the unlink follows it; without, the caller holds it, and lowers
`current_cache_size` itself, as LMCache's own callers do.
"""

from __future__ import annotations

from typing import Any

from semkv.consumers.storage import disk_entries, files
from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement


def _make(_current: AnyFunction) -> AnyFunction:
    def remove(self: Any, key: Any, force: bool = True) -> bool:
        """Take a chunk out of the index and remove its file."""
        if force:
            with self.disk_lock:
                meta, retired = disk_entries.take_locked(self, key)
        else:
            meta, retired = disk_entries.take_locked(self, key, reserved_too=False, forget_policy=False)
        if retired is not None:
            files.unlink_all((retired,))
        return meta is not None

    return remove


PATCH = Patch(
    name="disk_remove",
    reason="a missing file leaves the disk lock taken, and forced removal leaks quota",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.local_disk_backend:LocalDiskBackend.remove",
            _make,
            frozenset({"ed4f289e9ef6828e"}),
        ),
    ),
)
