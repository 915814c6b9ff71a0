# SPDX-License-Identifier: Apache-2.0
"""Transfers between pages on an accelerator and chunk objects in host memory, by torch's streams and pinned memory.

Objects are the engine's own blocks, [kv][layer][plane][block]. Two strategies: *copies*, one contiguous copy for each
run of neighbouring blocks of a plane, best for large blocks and all that a device without gather kernels can do;
*staging*, a gather on the device into a staging buffer and one copy a chunk, best for small blocks. Both keep two
buffers in flight; loads and stores have a stream and buffers each, so that the two directions overlap.

A store waits for what the engine's stream has queued, and has ended when `store` returns. A load lets the engine's
stream wait for it, and has ended for the host when `load` returns or raises, so that the objects may be let go. Ids and
sizes are checked before anything is queued. Two threads at most: one that loads and one that stores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from semkv.native.kv_format.contiguity import leaves
from semkv.native.kv_format.descriptors import get_device
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError
from semkv.native.transfer.plan import BlockPlaneArgs, block_plan
from semkv.native.transfer.streams import DeviceStreams, Mark

Strategy = Literal["copies", "staging"]
CANN_FOLDERS = ("ASCEND_OPP_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SMALL_BLOCK = 128 << 10
"""Below this a copy costs more to queue than to run: about 12 us to queue, at some 20 GB/s."""


@dataclass(frozen=True)
class Chunk:
    """One object to move: its blocks' ids, its bytes in host memory, how many of the first blocks to leave alone.

    A load also takes bytes that are on the pages' device already; `ready` is the point in the stream that put them
    there.
    """

    ids: Sequence[int]
    obj: torch.Tensor
    skip: int = 0
    ready: Mark | None = None


class AcceleratorTransfer:
    """Moves chunks of one engine's pages. Keeps the tensors alive."""

    def __init__(
        self,
        kv_caches: DiscoverableKVCache,
        fmt: EngineKVFormat,
        *,
        block_size: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.kv_caches = kv_caches
        self.plan = block_plan(kv_caches, fmt, block_size)
        self.streams = DeviceStreams(get_device(kv_caches))
        self._planes = plane_tensors(kv_caches, self.plan.planes)
        self.blocks = min(blocks for _, _, _, blocks in self.plan.planes)
        self.strategy: Strategy = strategy or self._choose()
        self._for_stores, self._for_loads = _Buffers(), _Buffers()

    def _choose(self) -> Strategy:
        """Staging for small blocks, where the device has the kernels that gather and scatter."""
        smallest = min(size for _, _, size, _ in self.plan.planes)
        return "staging" if smallest < SMALL_BLOCK and can_gather(self.streams.device) else "copies"

    def object_bytes(self, blocks: int) -> int:
        return blocks * self.plan.bytes_per_block

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Pages to objects."""
        self._check(chunks, "cpu")
        stream = self.streams.stores
        self.streams.after(stream, self.streams.current())
        waiting: list[tuple[Mark, torch.Tensor | None, torch.Tensor]] = []
        try:
            with self.streams.on(stream):
                for number, chunk in enumerate(chunks):
                    if len(waiting) == 2:  # the buffers of the chunk before last are wanted again
                        _finish_store(waiting.pop(0))
                    target = self._in_host_memory(self._for_stores, number, chunk)
                    self._to_host(number, chunk, target)
                    bounce = None if target is chunk.obj else target
                    waiting.append((self.streams.mark(stream), bounce, chunk.obj))
            for item in waiting:
                _finish_store(item)
        except BaseException:
            self.streams.mark(stream).wait()  # nothing may write to the objects any more
            raise

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Objects to pages."""
        self._check(chunks, "cpu", self.streams.device.type)
        stream = self.streams.loads
        engine = self.streams.current()
        self.streams.after(stream, engine)
        marks: list[Mark] = []
        try:
            with self.streams.on(stream):
                for number, chunk in enumerate(chunks):
                    if len(marks) >= 2:
                        marks[-2].wait()  # before its buffers are filled again
                    if chunk.ready is not None:
                        self.streams.await_mark(stream, chunk.ready)
                    self._to_pages(number, chunk)
                    marks.append(self.streams.mark(stream))
        finally:
            self.streams.after(engine, stream)
            self.streams.mark(stream).wait()

    def _in_host_memory(self, buffers: _Buffers, number: int, chunk: Chunk) -> torch.Tensor:
        """The object itself where the device can reach it, else a pinned buffer for its bytes."""
        size = self.object_bytes(len(chunk.ids))
        if self.streams.is_pinned(chunk.obj):
            return chunk.obj if chunk.obj.dtype == torch.uint8 else chunk.obj.view(torch.uint8).reshape(-1)[:size]
        return buffers.host[number % 2].of(size, self.streams.pinned)

    def _to_host(self, number: int, chunk: Chunk, target: torch.Tensor) -> None:
        if self.strategy == "copies":
            for page, part in self._runs(chunk, target):
                part.copy_(page, non_blocking=True)
            return
        staging = self._staging(self._for_stores, number, chunk)
        ids = self._ids(chunk.ids)
        for plane, part in self._parts(chunk, staging):
            torch.index_select(plane, 0, ids, out=part)
        target[: len(staging)].copy_(staging, non_blocking=True)

    def _to_pages(self, number: int, chunk: Chunk) -> None:
        source = chunk.obj
        if self.streams.real and source.device == self.streams.device:
            source = source.view(torch.uint8).reshape(-1)
        else:
            source = self._in_host_memory(self._for_loads, number, chunk)
            if source is not chunk.obj:
                source.copy_(chunk.obj.view(torch.uint8)[: len(source)])
        if self.strategy == "copies":
            for page, part in self._runs(chunk, source):
                page.copy_(part, non_blocking=True)
            return
        staging = source[: self.object_bytes(len(chunk.ids))]
        if source.device != self.streams.device or not self.streams.real:
            staging = self._staging(self._for_loads, number, chunk)
            staging.copy_(source[: len(staging)], non_blocking=True)
        ids = self._ids(chunk.ids[chunk.skip :])
        for plane, part in self._parts(chunk, staging):
            plane.index_copy_(0, ids, part[chunk.skip :])

    def _runs(self, chunk: Chunk, obj: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(page bytes, object bytes) of each run of neighbouring blocks, over all planes."""
        found, at = [], 0
        runs = runs_of(chunk.ids, chunk.skip)
        for plane, (_, stride, size, _) in zip(self._planes, self.plan.planes, strict=True):
            tight = stride == size
            for position, block, count in runs if tight else runs_of(chunk.ids, chunk.skip, joined=False):
                page = plane[block : block + count].reshape(-1) if tight else plane[block]
                start = at + position * size
                found.append((page, obj[start : start + count * size]))
            at += len(chunk.ids) * size
        return found

    def _parts(self, chunk: Chunk, staging: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(plane, its [block, bytes] part of the staging buffer)."""
        found, at = [], 0
        for plane, (_, _, size, _) in zip(self._planes, self.plan.planes, strict=True):
            end = at + len(chunk.ids) * size
            found.append((plane, staging[at:end].view(len(chunk.ids), size)))
            at = end
        return found

    def _staging(self, buffers: _Buffers, number: int, chunk: Chunk) -> torch.Tensor:
        size = self.object_bytes(len(chunk.ids))
        return buffers.device[number % 2].of(
            size, lambda wanted: torch.empty(wanted, dtype=torch.uint8, device=self.streams.device)
        )

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(ids), dtype=torch.int64).to(self.streams.device, non_blocking=True)

    def _check(self, chunks: Sequence[Chunk], *places: str) -> None:
        for number, chunk in enumerate(chunks):
            for position, block in enumerate(chunk.ids):
                if not 0 <= block < self.blocks:
                    raise IndexError(
                        f"chunk {number}: block id {block} at position {position} is outside [0, {self.blocks})"
                    )
            if not 0 <= chunk.skip <= len(chunk.ids):
                raise IndexError(f"chunk {number}: skip {chunk.skip} is more than the {len(chunk.ids)} blocks given")
            have, need = chunk.obj.numel() * chunk.obj.element_size(), self.object_bytes(len(chunk.ids))
            if have < need or chunk.obj.device.type not in places or not chunk.obj.is_contiguous():
                raise ValueError(
                    f"chunk {number}: the object has {have} bytes on {chunk.obj.device}, {need} contiguous bytes on "
                    f"{' or '.join(dict.fromkeys(places))} are needed"
                )


class _Buffer:
    """Memory that grows to what is asked for."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, size: int, make: object) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size:
            assert callable(make)
            self._memory = make(size)
        return self._memory[:size]


class _Buffers:
    """One direction's: two of each kind, in turns."""

    def __init__(self) -> None:
        self.host = [_Buffer(), _Buffer()]
        self.device = [_Buffer(), _Buffer()]


def _finish_store(item: tuple[Mark, torch.Tensor | None, torch.Tensor]) -> None:
    mark, bounce, obj = item
    mark.wait()
    if bounce is not None:
        obj.view(torch.uint8).reshape(-1)[: len(bounce)].copy_(bounce)


def runs_of(ids: Sequence[int], skip: int, *, joined: bool = True) -> list[tuple[int, int, int]]:
    """(position, first block, blocks) of each run of neighbouring ids from `skip` on; one block each if not joined."""
    runs: list[tuple[int, int, int]] = []
    for position in range(skip, len(ids)):
        if joined and runs and ids[position] == runs[-1][1] + runs[-1][2]:
            first, block, count = runs[-1]
            runs[-1] = (first, block, count + 1)
        else:
            runs.append((position, ids[position], 1))
    return runs


def plane_tensors(kv_caches: DiscoverableKVCache, planes: Sequence[BlockPlaneArgs]) -> list[torch.Tensor]:
    """Each plane as bytes, [blocks, bytes of a block], a view of the tensor that holds it."""
    tensors = list(leaves(kv_caches))
    return [_plane_tensor(tensors, *plane) for plane in planes]


def _plane_tensor(tensors: list[torch.Tensor], base: int, stride: int, size: int, blocks: int) -> torch.Tensor:
    for tensor in tensors:
        item = tensor.element_size()
        first = base - tensor.data_ptr()
        extent = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        if 0 <= first < extent * item and first % item == 0 and size % item == 0 and stride % item == 0:
            view = tensor.as_strided(
                (blocks, size // item), (stride // item, 1), tensor.storage_offset() + first // item
            )
            return view.view(torch.uint8)
    raise LayoutError(f"no tensor holds the plane at {base:#x}")


def can_gather(device: torch.device) -> bool:
    """Whether the device has kernels for index_select and index_copy_ on bytes, tried on a few.

    An NPU's kernels come with CANN. Without them nothing is tried: the operators would be queued and never end.
    """
    if device.type == "npu" and not any(Path(os.environ.get(name, "/nowhere")).is_dir() for name in CANN_FOLDERS):
        return False
    try:
        pages = torch.arange(8, dtype=torch.uint8).view(4, 2).to(device)
        ids = torch.tensor([2, 0]).to(device)
        found = torch.index_select(pages, 0, ids)
        pages.index_copy_(0, ids, found)
        return bool(found.to("cpu").tolist() == [[4, 5], [0, 1]] and pages.to("cpu").tolist()[2] == [4, 5])
    except (RuntimeError, NotImplementedError):
        return False
