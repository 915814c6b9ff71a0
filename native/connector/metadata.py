# SPDX-License-Identifier: Apache-2.0
"""What LMCache's metadata must say where whole blocks are moved: the layout in keys, and the true size of an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from semkv.native.connector.vllm_cpu import EngineLayoutError


class PageLayout(Protocol):
    """What is asked of an engine's layout: PageLayout or NpuLayout."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def opaque(self) -> bool:
        """Whether objects mean nothing to an engine with another tag."""

    @property
    def tag(self) -> str:
        """The layout's name."""


def adopt(metadata: Any, layout: PageLayout) -> None:
    """Once for each metadata object: the layout, its tag in the keys' model name, shapes of whole blocks."""
    if hasattr(metadata, "semkv_layout"):
        return
    metadata.semkv_layout = layout
    if layout.opaque:
        metadata.model_name = f"{metadata.model_name}+{layout.tag}"
    exact = metadata.get_shapes
    _set_shapes(metadata, layout, exact)


def fit(metadata: Any, bytes_per_block: int) -> None:
    """Makes an object as long as a block is over all layers, where LMCache's formula (equal layers) says otherwise."""
    layout: PageLayout = metadata.semkv_layout
    shapes, dtypes = metadata.get_shapes(layout.block_size), metadata.get_dtypes()
    declared = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    if declared == bytes_per_block:
        return
    if len(dtypes) != 1 or bytes_per_block % (layout.block_size * dtypes[0].itemsize):
        raise EngineLayoutError(
            f"the engine's layers hold {bytes_per_block} bytes for a block of {layout.block_size} tokens, not a "
            f"whole number of {dtypes} elements a token: such layers cannot share an object"
        )
    width = bytes_per_block // (layout.block_size * dtypes[0].itemsize)
    _set_shapes(metadata, layout, lambda tokens: [torch.Size([1, 1, tokens, width])])


def _set_shapes(metadata: Any, layout: PageLayout, exact: Callable[[int], list[torch.Size]]) -> None:
    """Objects hold whole blocks: the shape of an unfull chunk is that of its last block filled up."""

    def get_shapes(num_tokens: int | None = None) -> list[torch.Size]:
        tokens = metadata.chunk_size if num_tokens is None else num_tokens
        return exact(-(-tokens // layout.block_size) * layout.block_size)

    metadata.get_shapes = get_shapes
