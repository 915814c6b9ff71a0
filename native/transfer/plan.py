# SPDX-License-Identifier: Apache-2.0
"""From normalized KV caches to the planes that are moved, and the order of bytes in a chunk object.

Two kinds of object. *Rows*: [kv][layer][token][row], the same for every format with the same planes, one token after
the other; what is moved may begin and end anywhere. *Blocks*: [kv][layer][plane][block], the engine's own blocks as
they are; the only kind for opaque pages, and the cheapest. `tag` names the bytes: objects of
different tags must never meet. Errors: `LayoutError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semkv.native.extension import core
from semkv.native.kv_format.descriptors import object_tag
from semkv.native.kv_format.registry import get_spec
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError, PlaneView

RowPlaneArgs = tuple[int, int, int, int, int, int, int, int, int, int]
BlockPlaneArgs = tuple[int, int, int, int]


@dataclass(frozen=True)
class Segments:
    """All layers' planes in an object's order: K of every layer, then V of every layer, or one segment a layer."""

    segments: tuple[tuple[PlaneView, ...], ...]
    block_size: int


def segments_of(
    kv_caches: DiscoverableKVCache,
    fmt: EngineKVFormat,
    block_size: int | None = None,
    layers: Sequence[int] | None = None,
) -> Segments:
    """`block_size` for formats whose shape has none; `layers` all when absent."""
    spec = get_spec(kv_caches, fmt)
    chosen = range(spec.num_layers()) if layers is None else layers
    by_layer = [spec.planes(layer, block_size) for layer in chosen]
    if not by_layer:
        raise LayoutError(f"{fmt.name}: no layers to move")
    sizes = {plane.block_size for planes in by_layer for plane in planes}
    if len(sizes) != 1:
        raise LayoutError(f"{fmt.name}: layers with blocks of {sorted(sizes)} tokens cannot share an object")
    by_segment = [[planes[half]] for half in range(2) for planes in by_layer] if spec.kv_size == 2 else by_layer
    return Segments(tuple(map(tuple, by_segment)), sizes.pop())


@dataclass(frozen=True)
class RowPlan:
    """What core().RowCopier is made of."""

    planes: list[RowPlaneArgs]
    block_size: int
    bytes_per_token: int
    tag: str


def row_plan(kv_caches: DiscoverableKVCache, fmt: EngineKVFormat, block_size: int | None = None) -> RowPlan:
    if core().is_opaque(fmt):
        raise LayoutError(f"{fmt.name}: only whole blocks of an opaque page can be moved, never its tokens")
    found = segments_of(kv_caches, fmt, block_size)
    planes: list[RowPlaneArgs] = []
    before = 0
    for segment in found.segments:
        row, column = sum(plane.row_bytes for plane in segment), 0
        for p in segment:
            strides = (p.block_stride, p.token_stride, p.head_stride)
            planes.append((p.base, p.blocks, p.heads, p.head_bytes, *strides, before, row, column))
            column += p.row_bytes
        before += row
    return RowPlan(planes, found.block_size, before, object_tag(kv_caches, fmt, token_rows=True))


@dataclass(frozen=True)
class BlockPlan:
    """What core().BlockCopier is made of, and the bytes of each plane's block, in the object's order."""

    planes: list[BlockPlaneArgs]
    block_size: int
    bytes_per_block: int
    tag: str


def block_plan(kv_caches: DiscoverableKVCache, fmt: EngineKVFormat, block_size: int | None = None) -> BlockPlan:
    """Layers that share their memory with another (cross-layer KV sharing) are in the object once."""
    found = segments_of(kv_caches, fmt, block_size)
    planes: dict[int, BlockPlaneArgs] = {}
    for segment in found.segments:
        for p in segment:
            if not p.whole_block:
                raise LayoutError(f"{fmt.name}: a block is not one run of bytes")
            planes.setdefault(p.base if p.blocks else -len(planes), (p.base, p.block_stride, p.block_bytes, p.blocks))
    args = list(planes.values())
    total = sum(size for _, _, size, _ in args)
    tag = f"{fmt.name.lower()}.b{found.block_size}.p{len(args)}.{total}"
    return BlockPlan(args, found.block_size, total, tag)
