# SPDX-License-Identifier: Apache-2.0
"""The way in: from what an engine registers to a format and KV caches in its canonical shape.

Nothing is copied. Errors: `LayoutError`, and `AmbiguousLayoutError` where only a hint could decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from semkv.native.kv_format.contiguity import as_lists, attempt_permute_to_contiguous_view, leaves
from semkv.native.kv_format.detector import MixedFormatsError
from semkv.native.kv_format.registry import get_detector, get_spec
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, EngineType, LayoutError, LayoutHints


def normalize_kv_and_discover_format(
    kv_caches: Any, serving_engine: EngineType, layout_hints: LayoutHints | None = None
) -> tuple[EngineKVFormat, DiscoverableKVCache]:
    """The format of all layers, every layer checked, and the KV caches in physical order and canonical shape."""
    fmt, normalized = _discover(as_lists(kv_caches), serving_engine, layout_hints)
    get_spec(normalized, fmt).check()
    return fmt, normalized


detect_format = normalize_kv_and_discover_format


def _discover(
    kv_caches: DiscoverableKVCache, engine: EngineType, hints: LayoutHints | None
) -> tuple[EngineKVFormat, DiscoverableKVCache]:
    detector = get_detector(engine)
    # An opaque page's axes are declared, not physical: sorting them would say something about nothing.
    opaque = (hints or {}).get("page_order") == "opaque"
    physical = kv_caches if opaque else attempt_permute_to_contiguous_view(kv_caches, padded_axes=None)
    return detector.discover(physical, hints or {})


def normalize_and_discover_per_layer_formats(
    kv_caches: Any,
    layer_index_groups: Sequence[Sequence[int]],
    serving_engine: EngineType,
    layout_hints: LayoutHints | None = None,
) -> tuple[DiscoverableKVCache, list[EngineKVFormat]]:
    """For layers that differ: (normalized KV caches, one format for each layer).

    With `layer_index_groups`, only layers in a group are looked at; the rest keep their tensors and are given the first
    group's format, for nobody transfers them.
    """
    lists = as_lists(kv_caches)
    wanted = sorted({index for group in layer_index_groups for index in group})
    if isinstance(lists, torch.Tensor) or not wanted:
        return _per_layer(lists, serving_engine, layout_hints)
    fmt_all = _whole(lists, serving_engine, layout_hints)
    if fmt_all is not None:
        return fmt_all
    if wanted[0] < 0 or wanted[-1] >= len(lists):
        raise LayoutError(f"layer {wanted[-1]} is in a group, but there are {len(lists)} layers")
    part, formats = _per_layer([lists[index] for index in wanted], serving_engine, layout_hints)
    normalized, all_formats = list(lists), [formats[0]] * len(lists)
    for index, entry, fmt in zip(wanted, part, formats, strict=True):
        normalized[index], all_formats[index] = entry, fmt
    return normalized, all_formats


def _whole(
    lists: list[DiscoverableKVCache], engine: EngineType, hints: LayoutHints | None
) -> tuple[DiscoverableKVCache, list[EngineKVFormat]] | None:
    """All layers at once, where they can be read so: lists of keys and values are not lists of layers."""
    try:
        return _per_layer(lists, engine, hints)
    except LayoutError:
        return None


def _per_layer(
    lists: DiscoverableKVCache, engine: EngineType, hints: LayoutHints | None
) -> tuple[DiscoverableKVCache, list[EngineKVFormat]]:
    try:
        fmt, normalized = normalize_kv_and_discover_format(lists, engine, hints)
    except MixedFormatsError as mixed:
        for index, fmt in enumerate(mixed.formats):
            get_spec([mixed.kv_caches[index]], fmt).check()
        return mixed.kv_caches, mixed.formats
    return normalized, [fmt] * get_spec(normalized, fmt).num_layers()


def extract_kv_cache_shapes(kv_caches: DiscoverableKVCache) -> set[torch.Size]:
    """The different shapes among the tensors."""
    return {tensor.shape for tensor in leaves(kv_caches)}
