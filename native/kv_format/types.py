# SPDX-License-Identifier: Apache-2.0
"""The words of the KV layout library: engines, formats, hints, descriptors, errors.

`EngineKVFormat` and the predicates are the C++ core's own (see native/core/kv_format.h), never repeated here.
Importing this module needs the core: `CoreMissingError` otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, get_args

import torch

from semkv.native.extension import core

if TYPE_CHECKING:
    from semkv.native._core import EngineKVFormat
else:
    EngineKVFormat = core().EngineKVFormat

__all__ = [
    "KV_LAYOUT_NAMES",
    "AmbiguousLayoutError",
    "DiscoverableKVCache",
    "EngineKVFormat",
    "EngineType",
    "LayoutError",
    "LayoutHints",
    "PageBufferShapeDesc",
    "PlaneView",
]

DiscoverableKVCache: TypeAlias = "torch.Tensor | list[DiscoverableKVCache]"
"""What the library works on: a tensor, or lists of it nested to any depth."""

RawKVCache: TypeAlias = "torch.Tensor | Sequence[RawKVCache] | Mapping[str, RawKVCache]"
"""What an engine may hand in: tuples and dicts too."""

KVLayoutName = Literal["NHD", "HND", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "NZ"]
KV_LAYOUT_NAMES: tuple[str, ...] = get_args(KVLayoutName)
HEADS_FIRST = frozenset({"HND", "BLHNC", "LBHNC"})


class EngineType(Enum):
    """The serving engine whose tensors are looked at."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    ATOM = "atom"
    MOCK = "mock"


class LayoutHints(TypedDict, total=False):
    """What the engine says about its tensors that shapes and strides cannot. Every key is optional.

    kv_layout: order of heads and tokens in a block (NHD, HND), or vLLM's standardized names; NZ for Ascend 310P.
    num_kv_heads, head_dim, tokens_per_block: sizes, where an axis could be read in two ways.
    kv_list_layout: how SGLang's flat list is meant: "k_v" (all K, then all V) or "unified" (one entry a component).
    kv_axis: which axis of a 5-D tensor holds keys and values (0 or 1), where both have two entries.
    use_mla: whether the model has latent attention, where a latent and a single head look alike.
    page_order: "opaque" where the inside of a page has an order of the engine's own (vLLM on a CPU).
    """

    kv_layout: KVLayoutName
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    kv_list_layout: Literal["k_v", "unified"]
    kv_axis: Literal[0, 1]
    use_mla: bool
    page_order: Literal["opaque"]


class LayoutError(ValueError):
    """KV caches that the library cannot read, or a question that a layout has no answer to."""


class AmbiguousLayoutError(LayoutError):
    """Shapes and hints fit several formats. `candidates` are their names, `hint` the key that would decide."""

    def __init__(self, what: str, candidates: Sequence[EngineKVFormat], hint: str) -> None:
        self.candidates = tuple(candidate.name for candidate in candidates)
        self.hint = hint
        super().__init__(f"{what} can be {' or '.join(self.candidates)}; the layout hint {hint!r} decides")


@dataclass(frozen=True)
class PlaneView:
    """One plane of one layer, as addresses: what transfers work on. All strides in bytes.

    Token t of block b and head h is `head_bytes` bytes at `base + b*block_stride + t*token_stride + h*head_stride`.
    `row_bytes` = heads * head_bytes is its part of a token's row in an object. An opaque plane has no tokens inside:
    `block_bytes` whole, `token_stride` 0.
    """

    base: int
    blocks: int
    block_size: int
    heads: int
    head_bytes: int
    block_stride: int
    token_stride: int
    head_stride: int
    block_bytes: int
    itemsize: int
    opaque: bool = False

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def whole_block(self) -> bool:
        """Whether a block is one contiguous run of bytes."""
        return self.opaque or self.block_bytes == self.block_size * self.row_bytes


@dataclass(frozen=True)
class PageBufferShapeDesc:
    """The geometry of one group of layers. `block_stride_elems` 0 means blocks without gaps; `planes` has the rest."""

    kv_size: int
    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    element_size: int
    block_stride_elems: int = 0
    dtype: torch.dtype | None = None
    planes: tuple[PlaneView, ...] = field(default=(), compare=False)

    @property
    def scalars_per_token(self) -> int:
        return self.nh * self.hs

    @property
    def scalars_per_block(self) -> int:
        return self.bs * self.nh * self.hs

    @property
    def block_step(self) -> int:
        """Elements from one block to the next."""
        return self.block_stride_elems or self.scalars_per_block
