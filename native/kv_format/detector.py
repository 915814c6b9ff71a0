# SPDX-License-Identifier: Apache-2.0
"""What a detector is: one engine's rules from tensors and hints to a format. The base of the files in detectors/.

A detector is given KV caches in lists, every tensor in physical order. It looks at *every* layer and never guesses:
what fits several formats is an `AmbiguousLayoutError` that names them and the hint that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from semkv.native.kv_format.types import (
    HEADS_FIRST,
    KV_LAYOUT_NAMES,
    AmbiguousLayoutError,
    DiscoverableKVCache,
    EngineKVFormat,
    EngineType,
    LayoutError,
    LayoutHints,
)

INDEXER_WIDTH = 132  # 128 values and 4 scale bytes of one token


class MixedFormatsError(LayoutError):
    """Layers of different formats: `formats` has one for each, `kv_caches` the layers as normalized."""

    def __init__(self, formats: Sequence[EngineKVFormat], kv_caches: DiscoverableKVCache) -> None:
        self.formats = list(formats)
        self.kv_caches = kv_caches
        first = self.formats[0]
        other = next(index for index, fmt in enumerate(self.formats) if fmt != first)
        super().__init__(
            f"layer 0 is {first.name}, layer {other} is {self.formats[other].name}: ask for the format of each layer "
            "(normalize_and_discover_per_layer_formats)"
        )


class EngineDetector:
    """Subclasses set `engine` and implement `discover`."""

    engine: ClassVar[EngineType]

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        """The format and the KV caches in its canonical shape. Raises LayoutError, never returns a guess."""
        raise NotImplementedError


def one_format(
    formats: Sequence[EngineKVFormat], kv_caches: DiscoverableKVCache
) -> tuple[EngineKVFormat, DiscoverableKVCache]:
    """The format that all layers share."""
    if len(set(formats)) > 1:
        raise MixedFormatsError(formats, kv_caches)
    return formats[0], kv_caches


def is_indexer(tensor: torch.Tensor) -> bool:
    """A page of DSA indexer keys: bytes, 132 a token."""
    return bool(tensor.dtype == torch.uint8 and tensor.shape[-1] == INDEXER_WIDTH)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def heads_first(
    tensor: torch.Tensor, hints: LayoutHints, candidates: tuple[EngineKVFormat, EngineKVFormat], where: str
) -> bool:
    """Whether heads come before tokens in a tensor that ends [.., heads, tokens, size] or [.., tokens, heads, size].

    `candidates` are the formats if they do and if they don't. Sizes named by hints are believed first, and must not
    contradict the layout named.
    """
    left, right = int(tensor.shape[-3]), int(tensor.shape[-2])
    possible = {True, False}
    for first, second in ((hints.get("num_kv_heads"), None), (None, hints.get("tokens_per_block"))):
        heads, tokens = first, second
        if heads is not None:
            possible &= {answer for answer, size in ((True, left), (False, right)) if size == heads}
        if tokens is not None:
            possible &= {answer for answer, size in ((True, right), (False, left)) if size == tokens}
    if not possible:
        raise LayoutError(
            f"{where}: shape {shape_of(tensor)} has no axes for num_kv_heads {hints.get('num_kv_heads')} and "
            f"tokens_per_block {hints.get('tokens_per_block')}"
        )
    named = layout_named(hints)
    if named is not None:
        if named not in possible:
            raise LayoutError(
                f"{where}: kv_layout {hints.get('kv_layout')!r} contradicts num_kv_heads {hints.get('num_kv_heads')} "
                f"and tokens_per_block {hints.get('tokens_per_block')} for shape {shape_of(tensor)}"
            )
        return named
    if len(possible) == 2:
        raise AmbiguousLayoutError(f"{where}: shape {shape_of(tensor)}", candidates, "kv_layout")
    return True in possible


def layout_named(hints: LayoutHints) -> bool | None:
    """Whether the layout that the hints name has heads first; None without a name."""
    layout = hints.get("kv_layout")
    if layout is None:
        return None
    if layout not in KV_LAYOUT_NAMES:
        raise LayoutError(f"kv_layout {layout!r} is none of {', '.join(KV_LAYOUT_NAMES)}")
    return layout in HEADS_FIRST
