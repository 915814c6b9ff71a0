# SPDX-License-Identifier: Apache-2.0
"""The remote tier: chunks behind LMCache's remote connector.

Files of the `fs` connector are read straight into our own memory object, so that victims are chosen by our rules and
lengths are checked. Any other connector is asked on LMCache's loop, with a timeout, and its object copied. Who cannot
remove says so.

Threads: the rank worker's pool. Errors: OSError if a chunk is there but cannot be read whole or not in time.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from semkv.bus.status import Tier
from semkv.consumers.storage import files
from semkv.consumers.storage.evict import RemoteRemover
from semkv.consumers.storage.sources import ChunkGoneError, Found


class FileChunk:
    """A chunk in a file of the `fs` connector, behind its header if it has one."""

    tier = Tier.REMOTE

    def __init__(self, connector: Any, path: Path) -> None:
        self._path = str(path)
        self._direct = bool(connector.use_odirect)
        self._skip = int(connector.remote_metadata_bytes) if connector.save_chunk_meta else 0
        self.shape, self.dtype, self.fmt = connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt
        self.size = path.stat().st_size - self._skip
        if self._skip:
            from lmcache.v1.protocol import RemoteMetadata

            header = bytearray(self._skip)
            files.read_at(self._path, memoryview(header))
            described = RemoteMetadata.deserialize(bytes(header))
            self.shape, self.dtype, self.fmt = described.shapes, described.dtypes, described.fmt
            if described.length != self.size:
                raise files.ShortFileError(f"{path} holds {self.size} bytes, its header says {described.length}")

    def read_into(self, memory_obj: Any) -> int:
        """Fill the object from the file."""
        try:
            return files.read_full(self._path, memory_obj.byte_array, direct=self._direct, skip=self._skip)
        except FileNotFoundError as error:
            raise ChunkGoneError(str(error)) from error

    def close(self) -> None:
        """Nothing is held."""


class ConnectorChunk:
    """A chunk that only its connector can fetch."""

    tier = Tier.REMOTE

    def __init__(self, backend: Any, key: Any, size: int) -> None:
        self._backend = backend
        self._key = key
        metadata = backend.metadata
        self.shape, self.dtype = metadata.get_shapes(), metadata.get_dtypes()
        self.fmt = backend.connection_format
        self.size = size

    def read_into(self, memory_obj: Any) -> int:
        """Fetch the connector's object, bounded by LMCache's own timeout, and copy it."""
        fetched = self._backend.fetch(self._key)
        if fetched is None:
            raise ChunkGoneError(f"the remote store did not give chunk {self._key.chunk_hash_hex}")
        try:
            if len(fetched.byte_array) != len(memory_obj.byte_array):
                raise files.ShortFileError(
                    f"the remote store gave {len(fetched.byte_array)} bytes, the chunk has {len(memory_obj.byte_array)}"
                )
            memory_obj.raw_data.copy_(fetched.raw_data)
        finally:
            fetched.ref_count_down()
        return len(memory_obj.byte_array)

    def close(self) -> None:
        """Nothing is held."""


class RemoteTier:
    """One engine's remote backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._connector = backend.connection
        while hasattr(self._connector, "_connector"):  # LMCache wraps connectors for its own metrics
            self._connector = self._connector._connector
        self._files = hasattr(self._connector, "_get_file_path") and backend.config.remote_serde == "naive"
        self.metadata = backend.metadata

    @property
    def name(self) -> str:
        """The connector's name, for reasons."""
        return type(self._connector).__name__

    @property
    def connection_format(self) -> Any:
        """The memory format of the connector's chunks."""
        return self._connector.meta_fmt

    def exists(self, key: Any) -> bool:
        """Whether the store has the chunk."""
        if self._files:
            return Path(self._connector._get_file_path(key)).exists()
        asked = asyncio.run_coroutine_threadsafe(self._connector.exists(key), self._backend.loop)
        try:
            return bool(asked.result(float(self._backend.config.blocking_timeout_secs)))
        except FutureTimeoutError as error:
            asked.cancel()
            raise OSError(f"{self.name} did not answer in time") from error

    def fetch(self, key: Any) -> Any:
        """The connector's own object with a reference of ours, or None."""
        return self._backend.get_blocking(key)

    def find(self, key: Any) -> Found | None:
        """Describe a chunk in the store; None if it is not there."""
        if not self.exists(key):
            return None
        if not self._files:
            return ConnectorChunk(self, key, int(self._connector.full_chunk_size_bytes))
        try:
            return FileChunk(self._connector, Path(self._connector._get_file_path(key)))
        except FileNotFoundError:
            return None

    def size_of(self, key: Any) -> int | None:
        """Bytes of a chunk in the store, None if it is not there."""
        return int(self._connector.full_chunk_size_bytes) if self.exists(key) else None

    def remove(self, key: Any) -> int | None:
        """Remove a chunk; its bytes, None if it was not there; NotImplementedError where the connector cannot."""
        size = self.size_of(key)
        if size is None:
            return None
        if not self._connector.remove_sync(key) and self.exists(key):
            raise OSError(f"{self.name} did not remove chunk {key.chunk_hash_hex}")
        return size

    def remover(self) -> RemoteRemover:
        """How evict removes from here."""
        return RemoteRemover(self.name, self.exists, self.remove)


def remote_tier(backend: Any) -> RemoteTier | None:
    """The remote tier of this backend; None without a backend or while it has no connection."""
    if backend is None or backend.connection is None:
        return None
    return RemoteTier(backend)
