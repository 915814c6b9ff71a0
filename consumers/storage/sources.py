# SPDX-License-Identifier: Apache-2.0
"""Where a chunk that is not in DDR can be loaded from.

A source finds a chunk and describes what its memory object must look like; the found chunk then fills one. Between
finding and closing, the source keeps the chunk from being evicted by others as far as its tier can.

Threads: the rank worker's pool. Errors: `ChunkGoneError` if the chunk is not there after all (the entry is dropped by
then), OSError if it is there but cannot be read whole.
"""

from __future__ import annotations

from typing import Any, Protocol

from semkv.bus.status import Tier
from semkv.consumers.storage import disk_entries, files


class ChunkGoneError(LookupError):
    """The index named a chunk whose bytes are not there."""


class Found(Protocol):
    """A chunk that can be loaded."""

    tier: Tier
    shape: Any
    dtype: Any
    fmt: Any
    size: int

    def read_into(self, memory_obj: Any) -> int:
        """Fill the object; returns the bytes read."""

    def close(self) -> None:
        """Let go of what finding it held."""


class DiskChunk:
    """A pinned entry of the local disk backend; the pin is given back to exactly this entry."""

    tier = Tier.DISK

    def __init__(self, backend: Any, key: Any, meta: Any) -> None:
        self._backend = backend
        self._key = key
        self._meta = meta
        self.shape = meta.shape
        self.dtype = meta.dtype
        self.fmt = meta.fmt
        self.size = int(meta.size)

    def read_into(self, memory_obj: Any) -> int:
        """Fill the object from the chunk's file; an entry whose file is gone or damaged is dropped."""
        try:
            done = files.read_full(self._meta.path, memory_obj.byte_array, direct=self._backend.use_odirect)
        except FileNotFoundError as error:
            disk_entries.discard(self._backend, self._key, self._meta)
            raise ChunkGoneError(str(error)) from error
        except files.ShortFileError:
            disk_entries.discard(self._backend, self._key, self._meta)
            raise
        memory_obj.metadata.cached_positions = self._meta.cached_positions
        return done

    def close(self) -> None:
        """Give the pin back."""
        disk_entries.unpin(self._backend, [self._meta])


def find_on_disk(backend: Any, key: Any) -> DiskChunk | None:
    """Pin and describe a chunk on local disk; None if it is not there."""
    if backend is None:
        return None
    with backend.disk_lock:
        meta = backend.dict.get(key)
        if meta is None:
            return None
        meta.pin()
    return DiskChunk(backend, key, meta)


def size_on_disk(backend: Any, key: Any) -> int | None:
    """Bytes of a chunk on local disk without touching it; None if it is not there."""
    if backend is None:
        return None
    with backend.disk_lock:
        meta = backend.dict.get(key)
        return None if meta is None else int(meta.size)
