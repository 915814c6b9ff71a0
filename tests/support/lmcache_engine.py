# SPDX-License-Identifier: Apache-2.0
"""A real LMCache engine in this process, on the CPU: DDR pool, local disk, asynchronous loading, small chunks.

Nothing of LMCache is replaced. Two things stand in for vLLM, and are named so: `PagedStandIn` is the device connector
(pages are a dict of chunk tensors, so that bytes can be followed), and `LookupReplies` is what would send a lookup's
answer to the scheduler. One engine per process at a time; `close` ends its threads.

Run one with `with lmcache_engine(tmp_path, ...) as rig:`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventStatus, EventType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor


def _counters_go(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
    # LMCache's counters would stay in /tmp. The folder is there as long as this process, whose children use it too.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="semkv-")
    atexit.register(_counters_go, os.environ["PROMETHEUS_MULTIPROC_DIR"], os.getpid())

LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
LOCK_WAIT_S = 10.0
_numbers = itertools.count(1)


class LookupReplies:
    """Stands in for the server that answers the scheduler: keeps each lookup's answer."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def send_response_to_scheduler(self, lookup_id: str, num_hit_tokens: int) -> None:
        self.tokens[lookup_id] = num_hit_tokens


class PagedStandIn(GPUConnectorInterface):
    """Stands in for a device connector: its pages are filled from the tokens, and remembers what a load received."""

    def __init__(self) -> None:
        self.received: list[tuple[int, int, Any, str]] = []
        self.on_load: Callable[[list[Any]], None] | None = None

    @staticmethod
    def fill(memory_obj: Any, start: int, tokens: Sequence[int]) -> None:
        """Bytes that depend on the whole prefix, as KV does."""
        seed = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
        data = torch.frombuffer(
            bytearray(hashlib.shake_128(seed).digest(len(memory_obj.byte_array))), dtype=torch.uint8
        )
        memory_obj.raw_data[: data.numel()].copy_(data)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.fill(memory_obj, start, kwargs["page_tokens"][:end])

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        assert memory_obj.is_valid(), "a freed chunk reached the device"
        self.received.append((start, end, memory_obj, checksum(memory_obj)))

    def batched_to_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)
        if self.on_load is not None:
            self.on_load(list(memory_objs))

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD_SIZE])


def checksum(memory_obj: Any) -> str:
    """Digest of an object's bytes."""
    return hashlib.blake2b(bytes(memory_obj.byte_array), digest_size=8).hexdigest()


@dataclass
class Rig:
    """An engine with the handles tests need."""

    engine: Any
    replies: LookupReplies
    device: PagedStandIn
    config: Any
    chunk_size: int
    disk_path: Path | None
    _requests: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def manager(self) -> Any:
        return self.engine.storage_manager

    @property
    def cpu(self) -> Any:
        return self.manager.storage_backends["LocalCPUBackend"]

    @property
    def disk(self) -> Any:
        return self.manager.storage_backends["LocalDiskBackend"]

    @property
    def chunk_bytes(self) -> int:
        return 2 * LAYERS * self.chunk_size * HEADS * HEAD_SIZE * 4

    def tokens(self, chunks: int, *, seed: int = 0) -> list[int]:
        """A prompt of whole chunks; different seeds share no prefix."""
        return [seed * 1_000_003 + position for position in range(chunks * self.chunk_size)]

    def hashes(self, tokens: Sequence[int]) -> tuple[int, ...]:
        found = self.engine.token_database.process_tokens(tokens=list(tokens), make_key=False)
        return tuple(chunk_hash for _, _, chunk_hash in found)

    def keys(self, tokens: Sequence[int]) -> list[Any]:
        return [key for _, _, key in self.engine.token_database.process_tokens(tokens=list(tokens))]

    def store(self, tokens: Sequence[int], *, settle: bool = True) -> tuple[int, ...]:
        """Store a prompt as vLLM would after computing it; waits for the disk unless told not to."""
        tokens = list(tokens)
        self.engine.store(tokens=tokens, page_tokens=tokens, slot_mapping=torch.arange(len(tokens)))
        if settle:
            self.settle()
        return self.hashes(tokens)

    def lookup(self, tokens: Sequence[int], *, request: str | None = None, wait: bool = True, **configs: Any) -> str:
        """What the lookup server does with a request; returns the lookup's id."""
        request = request or f"request-{next(self._requests)}"
        self.replies.tokens.pop(request, None)
        chunks = list(self.engine.token_database.process_tokens(tokens=list(tokens), make_key=False))
        self.engine.async_lookup_and_prefetch(
            lookup_id=request,
            hashes=[chunk_hash for _, _, chunk_hash in chunks],
            offsets=[end - start for start, end, _ in chunks],
            pin=True,
            request_configs=configs or None,
        )
        if wait:
            self.wait_for(lambda: request in self.replies.tokens, f"the answer to lookup {request}")
        return request

    def hit_tokens(self, request: str) -> int:
        return self.replies.tokens[request]

    def retrieve(self, request: str, tokens: Sequence[int], *, skip_chunks: int = 0) -> int:
        """What the forward thread does: load, then clean up. Returns the tokens retrieved."""
        count = self.hit_tokens(request)
        tokens = list(tokens)[:count]
        if count:
            mask = torch.ones(len(tokens), dtype=torch.bool)
            mask[: skip_chunks * self.chunk_size] = False
            got = self.engine.retrieve(tokens, mask, req_id=request, vllm_cached_tokens=skip_chunks * self.chunk_size)
            count = int(got.sum())
        self.engine.lookup_unpin(request)
        return count

    def serve(self, tokens: Sequence[int], *, skip_chunks: int = 0, **configs: Any) -> int:
        """One whole request: lookup, retrieve, clean-up, store."""
        request = self.lookup(tokens, **configs)
        got = self.retrieve(request, tokens, skip_chunks=skip_chunks)
        self.store(tokens, settle=False)
        return got

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {seconds} s for {what}")
            time.sleep(0.001)

    def settle(self) -> None:
        """Wait until no disk write is on its way."""
        if "LocalDiskBackend" in self.manager.storage_backends:
            self.wait_for(lambda: not self.disk.disk_worker.put_tasks, "disk writes")

    def drop_from_ddr(self, tokens: Sequence[int]) -> None:
        """Leave a prompt's chunks on disk only, as memory pressure would."""
        for key in self.keys(tokens):
            with self.cpu.cpu_lock:
                if key in self.cpu.hot_cache:
                    self.cpu.remove(key, force=False)
                    self.cpu.cache_policy.update_on_force_evict(key)

    def pin_pool(self) -> list[Any]:
        """Take all the free memory there is, so that only eviction can give any."""
        taken = []
        while True:
            obj = self.cpu.memory_allocator.allocate(
                torch.Size([2, LAYERS, self.chunk_size, HEADS * HEAD_SIZE]), torch.float32
            )
            if obj is None:
                return taken
            taken.append(obj)

    def counts(self) -> dict[str, Any]:
        """Everything that must be as before after an operation that changed nothing."""
        allocator = self.cpu.memory_allocator.pin_allocator
        with self.cpu.cpu_lock:
            hot = {
                key.chunk_hash: (obj.get_ref_count(), obj.metadata.pin_count, obj.is_valid())
                for key, obj in self.cpu.hot_cache.items()
            }
        state: dict[str, Any] = {
            "hot": hot,
            "allocations": allocator.num_active_allocations,
            "allocated_bytes": allocator.total_allocated_size,
            "events": {
                str(status): self.engine.event_manager.get_events_count_by_status(EventType.LOADING, status)
                for status in EventStatus
            },
        }
        if "LocalDiskBackend" in self.manager.storage_backends:
            with self.disk.disk_lock:
                state["disk"] = {key.chunk_hash: (meta.size, meta.pin_count) for key, meta in self.disk.dict.items()}
                state["usage"] = self.disk.usage
                state["quota"] = self.disk.current_cache_size
            state["files"] = {path.name: path.stat().st_size for path in sorted(Path(self.disk.path).iterdir())}
        return state

    def check(self, *, settle: bool = True) -> None:
        """The invariants at a quiet point: locks free, one reference and no pin each, and all counts agree."""
        if settle:
            self.settle()
        assert_lock_free(self.cpu.cpu_lock, "cpu_lock")
        for key, (refs, pins, valid) in self.counts()["hot"].items():
            assert (refs, pins, valid) == (1, 0, True), f"chunk {key:x}: ref {refs}, pin {pins}, valid {valid}"
        allocator = self.cpu.memory_allocator.pin_allocator
        assert allocator.num_active_allocations == len(self.cpu.hot_cache)
        assert allocator.memcheck()
        if "LocalDiskBackend" not in self.manager.storage_backends:
            return
        assert_lock_free(self.disk.disk_lock, "disk_lock")
        state = self.counts()
        assert all(pins == 0 for _, pins in state["disk"].values()), state["disk"]
        assert state["usage"] == state["quota"] == sum(size for size, _ in state["disk"].values())
        names = {Path(meta.path).name: len_of(meta) for meta in self.disk.dict.values()}
        assert state["files"] == names


def len_of(meta: Any) -> int:
    """Bytes that a disk entry's file must have."""
    return int(torch.Size(meta.shape).numel()) * int(meta.dtype.itemsize)


def assert_lock_free(lock: Any, name: str) -> None:
    assert lock.acquire(timeout=LOCK_WAIT_S), f"{name} is still held"
    lock.release()


@contextlib.contextmanager
def lmcache_engine(
    tmp_path: Path,
    *,
    chunk_size: int = 16,
    pool_chunks: int = 16,
    disk_chunks: int = 64,
    disk: bool = True,
    settings: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Iterator[Rig]:
    """Build an engine, hand it out, close it."""
    chunk_bytes = 2 * LAYERS * chunk_size * HEADS * HEAD_SIZE * 4
    aligned = -(-chunk_bytes // 4096) * 4096
    disk_path = tmp_path / f"disk-{next(_numbers)}"
    chosen: dict[str, Any] = {
        "chunk_size": chunk_size,
        "local_cpu": True,
        "max_local_cpu_size": pool_chunks * aligned / 1024**3,
        "enable_async_loading": True,
        "save_unfull_chunk": False,
        "py_enable_gc": True,
        "extra_config": dict(extra or {}),
    }
    if disk:
        chosen |= {"local_disk": str(disk_path), "max_local_disk_size": disk_chunks * aligned / 1024**3}
    chosen |= settings or {}
    config = LMCacheEngineConfig.from_defaults(**chosen)
    name = f"semkv-test-{os.getpid()}-{next(_numbers)}"
    metadata = LMCacheMetadata(
        model_name="tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(LAYERS, 2, chunk_size, HEADS, HEAD_SIZE),
        role="worker",
        chunk_size=chunk_size,
        engine_id=name,
    )
    replies, device = LookupReplies(), PagedStandIn()
    engine = LMCacheEngineBuilder.get_or_create(
        name, config, metadata, device, lambda tensor, source: None, lambda obj, source: obj
    )
    try:
        engine.post_init(async_lookup_server=replies)
        yield Rig(engine, replies, device, config, chunk_size, disk_path if disk else None)
    finally:
        LMCacheEngineBuilder.destroy(name)
        PinMonitor.DestroyInstance()
