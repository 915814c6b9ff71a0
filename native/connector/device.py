# SPDX-License-Identifier: Apache-2.0
"""The device connector: LMCache's memory objects to and from an engine's pages in CPU memory, whole blocks at a time.

Called by LMCache on the engine's forward thread, one call at a time. The object of a chunk is [segment][layer][block]
raw bytes. A load skips the blocks that the engine's own prefix cache already holds, for those pages may be in use by
other requests. Errors: block ids and sizes are checked before a byte moves (IndexError, ValueError); an object that
LMCache has already freed is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from semkv.native.connector.planes import cpu_planes
from semkv.native.connector.vllm_cpu import CpuLayout, LayoutError
from semkv.native.extension import core


class BlockConnector:
    """Moves chunks of a vLLM that runs on the CPU. Registered as LMCache's GPUConnectorInterface by `install()`."""

    # LMCache asks for a stream where it would broadcast; the CPU has none, and asks nobody to wait.
    load_stream = None

    def __init__(self, layout: CpuLayout, *, threads: int = 1) -> None:
        self._core = core()
        self.layout = layout
        self.threads = threads
        self._pages: tuple[int, ...] = ()
        self._copier: Any = None

    def register(self, kv_caches: Sequence[torch.Tensor]) -> int:
        """Takes the engine's tensors; returns the bytes of one block over all layers."""
        pages = tuple(tensor.data_ptr() for tensor in kv_caches)
        if pages != self._pages:
            self._copier = self._core.BlockCopier(cpu_planes(kv_caches, self.layout))
            self._pages = pages
        return int(self._copier.bytes_per_block)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Object to pages, for tokens [start, end), less the blocks that the engine already holds."""
        held = max(0, int(kwargs.get("vllm_cached_tokens") or 0) - start)
        blocks = -(-(end - start) // self.layout.block_size)
        skip = min(held // self.layout.block_size, blocks)
        self._copy(self._core.Direction.scatter, memory_obj, start, end, kwargs, skip=skip)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Pages to object, for tokens [start, end)."""
        self._copy(self._core.Direction.gather, memory_obj, start, end, kwargs)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Raw bytes; LMCache asks only in its layerwise mode, which start-up refuses."""
        blocks = -(-num_tokens // self.layout.block_size)
        if self._copier is None:
            raise LayoutError("get_shape before the engine registered its KV tensors")
        return torch.Size([int(self._copier.object_bytes(blocks))])

    def _copy(
        self, direction: Any, memory_obj: Any, start: int, end: int, kwargs: dict[str, Any], *, skip: int = 0
    ) -> None:
        if not memory_obj.is_valid():
            raise ValueError(f"tokens [{start}, {end}): LMCache has already freed this memory object")
        if "kvcaches" in kwargs:
            self.register(kwargs["kvcaches"])
        if self._copier is None:
            raise LayoutError("no KV tensors: neither registered nor given as kvcaches")
        self._copier.copy_slots(
            direction,
            kwargs["slot_mapping"],
            start,
            end,
            self.layout.block_size,
            memory_obj.data_ptr,
            memory_obj.get_size(),
            skip=skip,
            threads=self.threads,
        )
