# SPDX-License-Identifier: Apache-2.0
"""The device connector for pages on an accelerator (NPU first): LMCache's memory objects by streams and pinned memory.

The same interface and the same objects, [segment][layer][block] raw bytes, as the CPU's. A batch is one call, its
chunks double-buffered and joined with the engine's stream once. The order of a page is the engine's own, so the format
and block size belong in the layout tag. Errors: as BlockConnector; nothing is queued when an id or a size is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from semkv.native.connector.vllm_cpu import EngineLayoutError
from semkv.native.extension import core
from semkv.native.layout import EngineType, LayoutHints, normalize_kv_and_discover_format
from semkv.native.transfer.accelerator import AcceleratorTransfer, Chunk


class AcceleratorConnector:
    """Moves chunks of an engine on an accelerator.

    `hints` say what its tensors' shapes cannot; `expected` is the format that its configuration promised.
    """

    def __init__(
        self,
        block_size: int,
        hints: LayoutHints,
        *,
        engine: EngineType = EngineType.VLLM,
        expected: str | None = None,
    ) -> None:
        self.block_size = block_size
        self.expected = expected
        self.format_name = ""
        self._hints = hints
        self._engine = engine
        self._transfer: AcceleratorTransfer | None = None
        self._pages: Any = None

    @property
    def load_stream(self) -> Any:
        """The stream that loads run on: LMCache broadcasts on it before it loads."""
        return self._ready().streams.loads

    @property
    def tag(self) -> str:
        """The layout's name in hash domains and keys."""
        return f"{self.format_name.lower()}.b{self.block_size}"

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._ready().streams.device

    def register(self, kv_caches: Sequence[Any]) -> int:
        """Takes the engine's tensors; returns the bytes of one block over all layers."""
        if self._transfer is None or kv_caches is not self._pages:
            fmt, normalized = normalize_kv_and_discover_format(list(kv_caches), self._engine, self._hints)
            transfer = AcceleratorTransfer(normalized, fmt, block_size=self.block_size)
            if transfer.plan.block_size != self.block_size or fmt.name != (self.expected or fmt.name):
                raise EngineLayoutError(
                    f"the engine registered {fmt.name} with {transfer.plan.block_size} tokens per block, its "
                    f"configuration says {self.expected or fmt.name} with {self.block_size}: semkv does not know how "
                    "this engine lays its pages out"
                )
            self._transfer, self._pages, self.format_name = transfer, kv_caches, fmt.name
        return self._transfer.plan.bytes_per_block

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Objects to pages, less the blocks that the engine already holds."""
        held = int(kwargs.get("vllm_cached_tokens") or 0)
        self._ready().load(self._chunks(memory_objs, starts, ends, kwargs, held))

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Pages to objects."""
        self._ready().store(self._chunks(memory_objs, starts, ends, kwargs, 0))

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([self._ready().object_bytes(-(-num_tokens // self.block_size))])

    def _chunks(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], kwargs: dict[str, Any], held: int
    ) -> list[Chunk]:
        slots = kwargs["slot_mapping"].to(device="cpu", dtype=torch.int64).contiguous()
        chunks = []
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            if not memory_obj.is_valid():
                raise ValueError(f"tokens [{start}, {end}): LMCache has already freed this memory object")
            ids = core().block_ids(slots, start, end, self.block_size)
            skip = min(max(0, held - start) // self.block_size, len(ids))
            data = memory_obj.raw_data.view(torch.uint8)[: memory_obj.get_size()]
            chunks.append(Chunk(ids, data, skip, getattr(memory_obj, "ready", None)))
        return chunks

    def _ready(self) -> AcceleratorTransfer:
        if self._transfer is None:
            raise EngineLayoutError("the engine has not registered its KV tensors")
        return self._transfer
