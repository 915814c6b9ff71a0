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

from semkv.native.connector.vllm_cpu import LATENT, CpuLayout, EngineLayoutError
from semkv.native.layout import EngineType, LayoutHints, normalize_kv_and_discover_format
from semkv.native.transfer.cpu import BlockTransfer


class BlockConnector:
    """Moves chunks of a vLLM that runs on the CPU. Registered as LMCache's GPUConnectorInterface by `install()`."""

    # LMCache asks for a stream where it would broadcast; the CPU has none, and asks nobody to wait.
    load_stream = None

    def __init__(self, layout: CpuLayout, *, threads: int = 1) -> None:
        self.layout = layout
        self.threads = threads
        self._pages: tuple[int, ...] = ()
        self._transfer: BlockTransfer | None = None

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return torch.device("cpu")

    def register(self, kv_caches: Sequence[torch.Tensor]) -> int:
        """Takes the engine's tensors; returns the bytes of one block over all layers."""
        pages = tuple(tensor.data_ptr() for tensor in kv_caches)
        if self._transfer is None or pages != self._pages:
            self._transfer = _transfer(kv_caches, self.layout, self.threads)
            self._pages = pages
        return self._transfer.plan.bytes_per_block

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Object to pages, for tokens [start, end), less the blocks that the engine already holds."""
        held = max(0, int(kwargs.get("vllm_cached_tokens") or 0) - start)
        blocks = -(-(end - start) // self.layout.block_size)
        skip = min(held // self.layout.block_size, blocks)
        self._ready(memory_obj, start, end, kwargs).scatter_range(
            kwargs["slot_mapping"], start, end, memory_obj.data_ptr, memory_obj.get_size(), skip_blocks=skip
        )

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Pages to object, for tokens [start, end)."""
        self._ready(memory_obj, start, end, kwargs).gather_range(
            kwargs["slot_mapping"], start, end, memory_obj.data_ptr, memory_obj.get_size()
        )

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
        if self._transfer is None:
            raise EngineLayoutError("get_shape before the engine registered its KV tensors")
        return torch.Size([self._transfer.object_bytes(blocks)])

    def _ready(self, memory_obj: Any, start: int, end: int, kwargs: dict[str, Any]) -> BlockTransfer:
        if not memory_obj.is_valid():
            raise ValueError(f"tokens [{start}, {end}): LMCache has already freed this memory object")
        if "kvcaches" in kwargs:
            self.register(kwargs["kvcaches"])
        if self._transfer is None:
            raise EngineLayoutError("no KV tensors: neither registered nor given as kvcaches")
        return self._transfer


def _transfer(kv_caches: Sequence[torch.Tensor], layout: CpuLayout, threads: int) -> BlockTransfer:
    """Checks that the tensors are laid out as the engine's configuration said."""
    hints: LayoutHints = {"use_mla": True} if layout.format == LATENT else {"page_order": "opaque"}
    fmt, normalized = normalize_kv_and_discover_format(list(kv_caches), EngineType.VLLM, hints)
    transfer = BlockTransfer(normalized, fmt, threads=threads)
    if fmt.name != layout.format or transfer.plan.block_size != layout.block_size:
        raise EngineLayoutError(
            f"the engine registered {fmt.name} with {transfer.plan.block_size} tokens per block, its configuration "
            f"says {layout.format} with {layout.block_size}: semkv does not know how this vLLM lays its pages out"
        )
    return transfer
