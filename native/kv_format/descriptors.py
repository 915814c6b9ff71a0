# SPDX-License-Identifier: Apache-2.0
"""From a format and its KV caches to what a transfer needs: geometry, strides, addresses, and the name of objects."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Sequence

import torch

from semkv.native.extension import core
from semkv.native.kv_format.contiguity import leaves
from semkv.native.kv_format.registry import get_spec, get_spec_class
from semkv.native.kv_format.spec import render_shape
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError, PageBufferShapeDesc

logger = logging.getLogger(__name__)


def make_page_buffer_shape_desc(
    kv_caches: DiscoverableKVCache,
    engine_kv_format: EngineKVFormat,
    layer_idx: int,
    num_layers_in_group: int,
    num_blocks: int,
    block_size: int,
    block_stride_elems: int | None = None,
) -> PageBufferShapeDesc:
    """The geometry of a group, taken from one of its layers; each plane's address and strides come with it."""
    spec = get_spec(kv_caches, engine_kv_format)
    return PageBufferShapeDesc(
        kv_size=spec.kv_size,
        nl=num_layers_in_group,
        nb=num_blocks,
        bs=block_size,
        nh=1 if core().is_mla(engine_kv_format) else spec.num_heads(layer_idx),
        hs=spec.head_size(layer_idx),
        element_size=int(spec.dtype(layer_idx).itemsize),
        block_stride_elems=block_stride_elems or 0,
        dtype=spec.dtype(layer_idx),
        planes=tuple(spec.planes(layer_idx, block_size)),
    )


def resolve_block_stride_and_log_layout(
    kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int, group_idx: int
) -> int | None:
    """Elements from block to block, for every format that has blocks as an axis; None where tokens share it."""
    spec = get_spec(kv_caches, engine_kv_format)
    stride = spec.block_stride(layer_idx)
    tensor = spec.layer_tensors(layer_idx)[0]
    logger.info(
        "KV group %d, layer %d: %s, shape %s, strides %s, offset %d, block stride %s",
        *(group_idx, layer_idx, engine_kv_format.name, tuple(tensor.shape), tensor.stride()),
        *(tensor.storage_offset(), stride),
    )
    return stride


def get_group_data_ptrs(
    kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_indices: Sequence[int]
) -> list[int]:
    return get_spec(kv_caches, engine_kv_format).data_ptrs(layer_indices)


def get_engine_kv_shape_description(engine_kv_format: EngineKVFormat) -> str:
    return get_spec_class(engine_kv_format).describe()


def get_attention_backend(engine_kv_format: EngineKVFormat) -> str:
    return "; ".join(get_spec_class(engine_kv_format).producers)


def get_concrete_engine_kv_shape(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> str:
    return get_spec(kv_caches, engine_kv_format).concrete_shape_str()


def get_concrete_engine_kv_shape_from_shape_desc(
    shape_desc: PageBufferShapeDesc, engine_kv_format: EngineKVFormat
) -> str:
    """The shape in numbers, for every format, from the descriptor alone."""
    d = shape_desc
    packed = core().is_fused_packed(engine_kv_format) and "TWO" in get_spec_class(engine_kv_format).axes()
    sizes = {"NL": d.nl, "NB": d.nb, "NBBS": d.nb * d.bs, "BS": d.bs, "NH": d.nh, "CS": d.hs, "TWO": 2, "ONE": 1}
    sizes |= {"HS": d.hs // 2 if packed else d.hs, "BSV": d.bs * 128, "BSS": d.bs * 4, "NZ": d.hs // 16, "C0": 16}
    sizes["PAGE"] = d.bs * d.nh * d.hs
    return render_shape(engine_kv_format.name, lambda label: str(sizes.get(label, label)))


def get_shape_and_dtype(kv_caches: DiscoverableKVCache, layer_indices: Sequence[int] | None = None) -> list[Hashable]:
    """For each layer a value that is equal for layers of equal structure."""
    entries = [kv_caches] if isinstance(kv_caches, torch.Tensor) else kv_caches
    chosen = range(len(entries)) if layer_indices is None else layer_indices
    return [_structure(entries[index]) for index in chosen]


def _structure(entry: DiscoverableKVCache) -> Hashable:
    if isinstance(entry, torch.Tensor):
        return tuple(entry.shape), entry.dtype
    return tuple(_structure(part) for part in entry)


def get_device(kv_caches: DiscoverableKVCache) -> torch.device:
    """The device that all tensors are on."""
    devices = {tensor.device for tensor in leaves(kv_caches)}
    if len(devices) != 1:
        raise LayoutError(f"KV caches on several devices: {sorted(map(str, devices))}")
    return devices.pop()


def object_tag(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, *, token_rows: bool) -> str:
    """The name of the bytes in a chunk object: objects with different tags hold different bytes for the same tokens.

    With `token_rows` an object is rows of tokens, equal for all formats with the same planes; else it is the engine's
    own blocks, and the format and block size are part of the name.
    """
    spec = get_spec(kv_caches, engine_kv_format)
    layers = []
    for layer in range(spec.num_layers()):
        planes = "+".join(str(p.row_bytes) for p in spec.planes(layer, 1 if _fused(engine_kv_format) else None))
        layers.append(f"{planes}.{str(spec.dtype(layer)).removeprefix('torch.')}")
    runs = [(text, len(list(same))) for text, same in itertools.groupby(layers)]
    shape = runs[0][0] if len(runs) == 1 else "_".join(f"{count}x{text}" for text, count in runs)
    if token_rows:
        if core().is_opaque(engine_kv_format):
            raise LayoutError(f"{engine_kv_format.name}: an opaque page has no token rows")
        return f"rows.kv{spec.kv_size}.l{spec.num_layers()}.{shape}"
    return f"{engine_kv_format.name.lower()}.b{spec.block_size()}.l{spec.num_layers()}.{shape}"


def _fused(fmt: EngineKVFormat) -> bool:
    return bool(core().is_pbs_fused(fmt))
