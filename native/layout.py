# SPDX-License-Identifier: Apache-2.0
"""The questions that may be asked of a KV cache: a thin front of kv_format, by the names that LMCache's users know.

`normalize_kv_and_discover_format` first; everything else takes what it returned. All raise `LayoutError` (a ValueError)
for what a layout has no answer to. Needs torch and the C++ core.
"""

from __future__ import annotations

import torch

from semkv.native.kv_format.contiguity import (
    assert_contiguous,
    attempt_permute_to_contiguous_view,
    measure_list_depth_until_tensor,
)
from semkv.native.kv_format.descriptors import (
    get_attention_backend,
    get_concrete_engine_kv_shape,
    get_concrete_engine_kv_shape_from_shape_desc,
    get_device,
    get_engine_kv_shape_description,
    get_group_data_ptrs,
    get_shape_and_dtype,
    make_page_buffer_shape_desc,
    object_tag,
    resolve_block_stride_and_log_layout,
)
from semkv.native.kv_format.detection import (
    detect_format,
    extract_kv_cache_shapes,
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)
from semkv.native.kv_format.groups import (
    AttnWindowDesc,
    EngineGroupInfo,
    KernelGroupIdentity,
    KernelGroupInfo,
    KVLayerGroupsManager,
    ObjectGroupInfo,
    group_layers_by_identity,
)
from semkv.native.kv_format.registry import get_spec, get_spec_class
from semkv.native.kv_format.shape_spec import format_kvcache_shape_spec, parse_kvcache_shape_spec
from semkv.native.kv_format.types import (
    AmbiguousLayoutError,
    DiscoverableKVCache,
    EngineKVFormat,
    EngineType,
    LayoutError,
    LayoutHints,
    PageBufferShapeDesc,
    PlaneView,
)

__all__ = [
    "AmbiguousLayoutError",
    "AttnWindowDesc",
    "DiscoverableKVCache",
    "EngineGroupInfo",
    "EngineKVFormat",
    "EngineType",
    "KVLayerGroupsManager",
    "KernelGroupIdentity",
    "KernelGroupInfo",
    "LayoutError",
    "LayoutHints",
    "ObjectGroupInfo",
    "PageBufferShapeDesc",
    "PlaneView",
    "assert_contiguous",
    "attempt_permute_to_contiguous_view",
    "detect_format",
    "extract_kv_cache_shapes",
    "format_kvcache_shape_spec",
    "get_attention_backend",
    "get_block_size",
    "get_concrete_engine_kv_shape",
    "get_concrete_engine_kv_shape_from_shape_desc",
    "get_device",
    "get_dtype",
    "get_elements_per_layer",
    "get_engine_kv_shape_description",
    "get_group_data_ptrs",
    "get_head_size",
    "get_hidden_dim_size",
    "get_kv_size",
    "get_num_blocks",
    "get_num_heads",
    "get_num_layers",
    "get_page_buffer_size",
    "get_shape_and_dtype",
    "get_spec",
    "get_spec_class",
    "get_tokens_per_layer",
    "group_layers_by_identity",
    "make_page_buffer_shape_desc",
    "measure_list_depth_until_tensor",
    "normalize_and_discover_per_layer_formats",
    "normalize_kv_and_discover_format",
    "object_tag",
    "parse_kvcache_shape_spec",
    "resolve_block_stride_and_log_layout",
]


def get_num_layers(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    return get_spec(kv_caches, engine_kv_format).num_layers()


def get_num_blocks(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    return get_spec(kv_caches, engine_kv_format).num_blocks()


def get_block_size(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int = 0) -> int:
    return get_spec(kv_caches, engine_kv_format).block_size(layer_idx)


def get_page_buffer_size(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    """Token slots of one layer."""
    return get_spec(kv_caches, engine_kv_format).page_buffer_size()


def get_kv_size(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    """Planes of an object: 2 where keys and values are apart, 1 where they are one."""
    return get_spec(kv_caches, engine_kv_format).kv_size


def get_num_heads(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int = 0) -> int:
    return get_spec(kv_caches, engine_kv_format).num_heads(layer_idx)


def get_hidden_dim_size(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int = 0) -> int:
    return get_spec(kv_caches, engine_kv_format).hidden_dim(layer_idx)


def get_head_size(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int = 0) -> int:
    return get_spec(kv_caches, engine_kv_format).head_size(layer_idx)


def get_tokens_per_layer(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    return get_spec(kv_caches, engine_kv_format).tokens_per_layer()


def get_elements_per_layer(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat) -> int:
    return get_spec(kv_caches, engine_kv_format).elements_per_layer()


def get_dtype(kv_caches: DiscoverableKVCache, engine_kv_format: EngineKVFormat, layer_idx: int = 0) -> torch.dtype:
    return get_spec(kv_caches, engine_kv_format).dtype(layer_idx)
