# SPDX-License-Identifier: Apache-2.0
"""Layers of equal structure as groups: what is transferred with one descriptor, and what is stored as one object.

Works for every format. A layer tagged with engine group -1 belongs to no group. Errors: `LayoutError` naming the group,
the value and what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from semkv.native.extension import core
from semkv.native.kv_format.descriptors import make_page_buffer_shape_desc, resolve_block_stride_and_log_layout
from semkv.native.kv_format.registry import get_spec
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError, PageBufferShapeDesc

EXCLUDED_ENGINE_GROUP = -1


class KernelGroupIdentity(NamedTuple):
    """What layers of one group have in common; `plane_widths` tells apart splits of the same sum."""

    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    engine_group_idx: int
    dtype: torch.dtype
    engine_kv_format: EngineKVFormat
    plane_widths: tuple[int, ...]


@dataclass(frozen=True)
class EngineGroupInfo:
    """What the engine says of a group. `tokens_per_block` exceeds the slots of a block in compressed layers."""

    layer_indices: tuple[int, ...]
    tokens_per_block: int = 0
    sw_size_tokens: int = -1
    engine_group_idx: int = 0
    extra_object_group_tag: int = 0
    recurrent_state: bool = False


@dataclass(frozen=True)
class KernelGroupInfo:
    """Layers that one descriptor describes. A group that was read from text has no format."""

    layer_indices: list[int]
    shape_desc: PageBufferShapeDesc
    dtype: torch.dtype
    engine_kv_format: EngineKVFormat | None
    tokens_per_block: int = 0
    engine_group_idx: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    @property
    def hidden_dim_size(self) -> int:
        return self.shape_desc.nh * self.shape_desc.hs

    @property
    def slots_per_block(self) -> int:
        return self.shape_desc.bs

    def calculate_slots(self, num_tokens: int) -> int:
        """The slots of so many tokens, whole blocks being `tokens_per_block` tokens."""
        return -(-num_tokens * self.slots_per_block // (self.tokens_per_block or self.slots_per_block))


@dataclass(frozen=True)
class ObjectGroupInfo:
    """Kernel groups whose bytes are stored as one object. `sw_size_chunks` -1: all of the prefix is kept."""

    kernel_group_indices: list[int]
    sw_size_chunks: int = -1
    aux: bool = False
    recurrent: bool = False


@dataclass(frozen=True)
class AttnWindowDesc:
    """For each object group the chunks its attention looks back on; -1 is all of them."""

    windows: tuple[int, ...] = field(default=())


def group_layers_by_identity(
    kv_caches: DiscoverableKVCache,
    engine_kv_formats: Sequence[EngineKVFormat],
    per_layer_engine_group_idx: Sequence[int] | None = None,
    tokens_per_block: int | None = None,
) -> list[tuple[KernelGroupIdentity, list[int]]]:
    """(identity, layers) in the order of first layers. `tokens_per_block` where the shape has no blocks."""
    groups: dict[KernelGroupIdentity, list[int]] = {}
    for layer, fmt in enumerate(engine_kv_formats):
        tag = 0 if per_layer_engine_group_idx is None else per_layer_engine_group_idx[layer]
        if tag == EXCLUDED_ENGINE_GROUP:
            continue
        groups.setdefault(_identity(kv_caches, fmt, layer, tag, tokens_per_block), []).append(layer)
    return list(groups.items())


def _identity(
    kv_caches: DiscoverableKVCache, fmt: EngineKVFormat, layer: int, tag: int, tokens_per_block: int | None
) -> KernelGroupIdentity:
    spec = get_spec(kv_caches, fmt)
    if not core().is_pbs_fused(fmt):
        block_size = spec.block_size(layer)
    elif tokens_per_block:
        block_size = tokens_per_block
    else:
        raise LayoutError(f"layer {layer}: {fmt.name} has no block size in its shape; give tokens_per_block")
    widths = tuple(plane.row_bytes for plane in spec.planes(layer, block_size))
    heads = 1 if core().is_mla(fmt) else spec.num_heads(layer)
    return KernelGroupIdentity(
        spec.kv_size, heads, spec.head_size(layer), block_size, tag, spec.dtype(layer), fmt, widths
    )


class KVLayerGroupsManager:
    """The groups of one engine's layers."""

    def __init__(
        self,
        kv_caches: DiscoverableKVCache,
        engine_kv_formats: Sequence[EngineKVFormat],
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        lmcache_tokens_per_chunk: int = 256,
        separate_object_groups: bool = False,
        *,
        tokens_per_block: int | None = None,
    ) -> None:
        self._chunk = lmcache_tokens_per_chunk
        self._full_windows = False
        tags = _tags(len(engine_kv_formats), engine_group_infos)
        found = group_layers_by_identity(kv_caches, engine_kv_formats, tags, tokens_per_block)
        infos = _match(found, engine_group_infos)
        self.kernel_groups = [
            self._group(kv_caches, number, identity, layers, info)
            for number, ((identity, layers), info) in enumerate(zip(found, infos, strict=True))
        ]
        self.object_groups = self._objects(separate_object_groups)

    def _group(
        self,
        kv_caches: DiscoverableKVCache,
        number: int,
        identity: KernelGroupIdentity,
        layers: list[int],
        info: EngineGroupInfo | None,
    ) -> KernelGroupInfo:
        fmt, bs = identity.engine_kv_format, identity.block_size
        stride = resolve_block_stride_and_log_layout(kv_caches, fmt, layers[0], number)
        blocks = get_spec(kv_caches, fmt).planes(layers[0], bs)[0].blocks
        desc = make_page_buffer_shape_desc(kv_caches, fmt, layers[0], len(layers), blocks, bs, stride)
        said = info or EngineGroupInfo(tuple(layers))
        group = KernelGroupInfo(
            layer_indices=layers,
            shape_desc=desc,
            dtype=identity.dtype,
            engine_kv_format=fmt,
            tokens_per_block=said.tokens_per_block or bs,
            engine_group_idx=identity.engine_group_idx,
            sw_size_tokens=said.sw_size_tokens,
            extra_object_group_tag=said.extra_object_group_tag,
            recurrent_state=said.recurrent_state,
        )
        self._check(number, group)
        return group

    def _check(self, number: int, group: KernelGroupInfo) -> None:
        tokens, window = group.tokens_per_block, group.sw_size_tokens
        if tokens % group.slots_per_block:
            raise LayoutError(
                f"group {number}: tokens_per_block {tokens} is not a multiple of its {group.slots_per_block} slots"
            )
        if self._chunk % tokens:
            raise LayoutError(f"group {number}: a chunk of {self._chunk} tokens is not whole blocks of {tokens} tokens")
        if 0 < window < self._chunk and window % tokens:
            raise LayoutError(f"group {number}: a window of {window} tokens is not whole blocks of {tokens} tokens")

    @property
    def num_kernel_groups(self) -> int:
        return len(self.kernel_groups)

    @property
    def num_object_groups(self) -> int:
        return len(self.object_groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self._at(0).shape_desc.nb

    @property
    def kv_layer_groups(self) -> list[KernelGroupInfo]:
        return self.kernel_groups

    @property
    def num_groups(self) -> int:
        return self.num_kernel_groups

    def get_shape_desc(self, kernel_group_idx: int) -> PageBufferShapeDesc:
        return self._at(kernel_group_idx).shape_desc

    def calculate_num_blocks(self, kernel_group_idx: int, num_tokens: int) -> int:
        return -(-num_tokens // self._at(kernel_group_idx).tokens_per_block)

    def get_slots_per_chunk(self, kernel_group_idx: int) -> int:
        return self._at(kernel_group_idx).calculate_slots(self._chunk)

    def get_slots_per_chunk_in_sw(self, kernel_group_idx: int) -> int:
        """The slots of a chunk that its window keeps: fewer than the chunk's when the window is shorter."""
        return self._at(kernel_group_idx).calculate_slots(self.get_subchunk_sw_size_tokens(kernel_group_idx))

    def get_subchunk_sw_size_tokens(self, kernel_group_idx: int) -> int:
        """The window where it is shorter than a chunk, else the chunk."""
        window = self._at(kernel_group_idx).sw_size_tokens
        return window if 0 < window < self._chunk and not self._full_windows else self._chunk

    def enable_full_sw_kv(self) -> None:
        """From now on whole chunks are kept, windows or not."""
        self._full_windows = True

    def get_attn_desc(self) -> AttnWindowDesc:
        return AttnWindowDesc(tuple(group.sw_size_chunks for group in self.object_groups))

    def _at(self, index: int) -> KernelGroupInfo:
        if not 0 <= index < len(self.kernel_groups):
            raise LayoutError(f"no kernel group {index}: there are {len(self.kernel_groups)}")
        return self.kernel_groups[index]

    def _objects(self, separate: bool) -> list[ObjectGroupInfo]:
        if not self.kernel_groups:
            return []
        if not separate:
            return [ObjectGroupInfo(list(range(len(self.kernel_groups))))]
        buckets: dict[tuple[int, bool, int], list[int]] = {}
        for index, group in enumerate(self.kernel_groups):
            window = -(-group.sw_size_tokens // self._chunk) if group.sw_size_tokens > 0 else -1
            buckets.setdefault((group.extra_object_group_tag, group.recurrent_state, window), []).append(index)
        ordered = sorted(buckets.items(), key=lambda item: (item[0][0] != 0, item[1][0]))
        return [
            ObjectGroupInfo(indices, window, aux=tag != 0, recurrent=recurrent)
            for (tag, recurrent, window), indices in ordered
        ]


def _tags(layers: int, infos: Sequence[EngineGroupInfo]) -> list[int] | None:
    if not infos:
        return None
    tags = [EXCLUDED_ENGINE_GROUP] * layers
    for info in infos:
        for layer in info.layer_indices:
            if not 0 <= layer < layers:
                raise LayoutError(f"an engine group names layer {layer}, there are {layers}")
            tags[layer] = info.engine_group_idx
    return tags


def _match(
    found: list[tuple[KernelGroupIdentity, list[int]]], infos: Sequence[EngineGroupInfo]
) -> list[EngineGroupInfo] | list[None]:
    if not infos:
        return [None] * len(found)
    said = [list(info.layer_indices) for info in infos]
    seen = [layers for _, layers in found]
    if said != seen:
        raise LayoutError(f"the engine's groups {said} are not the groups of equal structure {seen}")
    return list(infos)
