# SPDX-License-Identifier: Apache-2.0
"""From registered KV tensors to the planes that the C++ core copies.

A plane is one tensor's run of blocks: base address, block stride, block bytes, block count. The order of planes is the
order inside a chunk object: [segment][layer][block] (all K, then all V, where the engine keeps them apart). Layers that
share one tensor (cross-layer KV sharing) are stored once. Errors: `LayoutError` naming layer and shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semkv.native.connector.vllm_cpu import LATENT, PACKED, SPLIT, CpuLayout, LayoutError

Plane = tuple[int, int, int, int]


def cpu_planes(kv_caches: Sequence[Any], layout: CpuLayout) -> list[Plane]:
    """The planes of vLLM's CPU tensors, checked one layer at a time against the layout that the engine announced."""
    if not kv_caches:
        raise LayoutError("the engine registered no KV tensors")
    segments: list[list[Any]] = [[], []] if layout.format == SPLIT else [[]]
    seen: set[int] = set()
    for index, tensor in enumerate(kv_caches):
        _check(index, tensor, layout)
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        for number, segment in enumerate(segments):
            segment.append(tensor[number] if layout.format == SPLIT else tensor)
    return [_plane(tensor) for segment in segments for tensor in segment]


def _check(index: int, tensor: Any, layout: CpuLayout) -> None:
    shape = tuple(tensor.shape)
    block_axis = {SPLIT: 3, PACKED: 2, LATENT: 1}[layout.format]
    known = len(shape) == {SPLIT: 5, PACKED: 4, LATENT: 3}[layout.format] and shape[block_axis] == layout.block_size
    if not known or (layout.format == SPLIT and shape[0] != 2):
        raise LayoutError(
            f"layer {index}: its KV tensor has shape {shape}, which is not {layout.format} with {layout.block_size} "
            "tokens per block; this vLLM lays its pages out in a way that semkv does not know"
        )
    if tensor.device.type != "cpu":
        raise LayoutError(f"layer {index}: its KV tensor is on {tensor.device}, not on the CPU")
    pages = tensor[0] if layout.format == SPLIT else tensor
    if pages.shape[0] and not pages[0].is_contiguous():
        raise LayoutError(f"layer {index}: the inside of a block is not contiguous (strides {tuple(pages.stride())})")


def _plane(pages: Any) -> Plane:
    size = pages.element_size()
    block = pages[0].numel() * size if pages.shape[0] else 0
    return pages.data_ptr(), pages.stride(0) * size, block, pages.shape[0]
