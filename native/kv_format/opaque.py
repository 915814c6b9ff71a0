# SPDX-License-Identifier: Apache-2.0
"""What opaque-page formats share: a declared shape that tells sizes, and an inside that only the engine can read.

Only whole blocks can be moved, and only to an engine with the same layout tag (block size, instruction set, type).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import PlaneView


class OpaquePageSpec(KVFormatSpec):
    """`declared` names the axes of the tensor as the engine declares it."""

    declared: ClassVar[tuple[str, ...]]

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        return cls.declared

    def concrete_shape_str(self) -> str:
        first = self.layer_tensors(0)[0]
        outer = [str(first.shape[index]) for index, axis in enumerate(self.declared) if axis in ("TWO", "NB")]
        page = [str(first.shape[index]) for index, axis in enumerate(self.declared) if axis not in ("TWO", "NB")]
        return f"{self.num_layers()} x [{', '.join(outer)}, page of {'*'.join(page)}]"

    def _plane(self, part: torch.Tensor, axes: list[str], block_size: int | None) -> PlaneView:
        size = part.element_size()
        block = math.prod(part.shape[1:]) * size
        return PlaneView(
            base=part.data_ptr(),
            blocks=int(part.shape[0]),
            block_size=int(part.shape[axes.index("BS")]),
            heads=1,
            head_bytes=block,
            block_stride=int(part.stride(0)) * size,
            token_stride=0,
            head_stride=block,
            block_bytes=block,
            itemsize=size,
            opaque=True,
        )
