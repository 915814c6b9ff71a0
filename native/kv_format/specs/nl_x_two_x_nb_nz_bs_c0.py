# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_X_NB_NZ_BS_C0: vLLM-Ascend on the 310P: (K, V), cut into pieces of 16 elements.

Shape [NB, NH * HS / 16, BS, 16]: for each piece all tokens of a block. Heads cannot be told from the shape; objects are
those of the plain (K, V) format, a token's row in natural order.
"""

from __future__ import annotations

import torch

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat, PlaneView


class NlXTwoXNbNzBsC0(KVFormatSpec):
    format = EngineKVFormat.NL_X_TWO_X_NB_NZ_BS_C0
    producers = ("vLLM-Ascend on the 310P",)

    def num_heads(self, layer_idx: int = 0) -> int:
        """One: the shape has only the product of heads and head size."""
        return 1

    def head_size(self, layer_idx: int = 0) -> int:
        return self.size("NZ", layer_idx) * self.size("C0", layer_idx)

    def _plane(self, part: torch.Tensor, axes: list[str], block_size: int | None) -> PlaneView:
        """Each piece moves like a head of 16 elements."""
        names = {"NZ": "NH", "C0": "HS"}
        return super()._plane(part, [names.get(axis, axis) for axis in axes], block_size)
