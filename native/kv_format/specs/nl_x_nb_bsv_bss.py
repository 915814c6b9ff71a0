# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_BSV_BSS: the DSA indexer's keys, a block's values and then its scales in one page of bytes.

The declared shape [NB, BS, 132] says 132 bytes a token, but a page is BS * 128 bytes of values, then BS * 4 of scales.
In an object a token's row is its 128 values and its 4 scale bytes.
"""

from __future__ import annotations

import torch

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat, LayoutError, PlaneView

VALUE_BYTES = 128
SCALE_BYTES = 4
WIDTH = VALUE_BYTES + SCALE_BYTES


class NlXNbBsvBss(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_BSV_BSS
    producers = ("vLLM's DSA indexer (DeepSeek V3.2, GLM-5)", "ATOM index planes")

    @classmethod
    def paged_layer_shape(cls, nb: int, bs: int, nh: int, hs: int) -> tuple[int, ...]:
        return nb, bs, hs

    def num_blocks(self, layer_idx: int = 0) -> int:
        return int(self.layer_tensors(layer_idx)[0].shape[0])

    def block_size(self, layer_idx: int = 0) -> int:
        return int(self.layer_tensors(layer_idx)[0].shape[1])

    def head_size(self, layer_idx: int = 0) -> int:
        return int(self.layer_tensors(layer_idx)[0].shape[2])

    def _concrete(self, label: str) -> str:
        """Each half shows its bytes in one block."""
        parts = {"BSV": VALUE_BYTES, "BSS": SCALE_BYTES}
        return str(self.block_size() * parts[label]) if label in parts else super()._concrete(label)

    def block_stride(self, layer_idx: int = 0) -> int | None:
        return int(self.layer_tensors(layer_idx)[0].stride(0))

    def planes(self, layer_idx: int = 0, block_size: int | None = None) -> list[PlaneView]:
        tensor = self.layer_tensors(layer_idx)[0]
        tokens = self.block_size(layer_idx)
        return [
            PlaneView(
                base=tensor.data_ptr() + offset,
                blocks=int(tensor.shape[0]),
                block_size=tokens,
                heads=1,
                head_bytes=width,
                block_stride=int(tensor.stride(0)),
                token_stride=width,
                head_stride=width,
                block_bytes=tokens * width,
                itemsize=1,
            )
            for offset, width in ((0, VALUE_BYTES), (tokens * VALUE_BYTES, SCALE_BYTES))
        ]

    def _rank(self) -> int:
        return 3

    def _check_inside(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.dtype != torch.uint8 or tensor.shape[2] != WIDTH:
            raise LayoutError(f"{where} of {tensor.dtype}: an indexer page is uint8 with {WIDTH} bytes a token")
        if tensor.numel() and not tensor[0].is_contiguous():
            raise LayoutError(f"{where} with strides {tensor.stride()}: a gap inside a block; dim-0 padding only")
