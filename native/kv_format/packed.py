# SPDX-License-Identifier: Apache-2.0
"""What the two deprecated packed formats share: K and V of a head are an axis of their own inside a token's row."""

from __future__ import annotations

import warnings
from typing import ClassVar

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import DiscoverableKVCache


class DeprecatedPackedSpec(KVFormatSpec):
    """`head_size` counts K and V, `hidden_dim` one of them: the numbers that consumers of these formats were given."""

    _warned: ClassVar[set[str]] = set()

    def __init__(self, kv_caches: DiscoverableKVCache) -> None:
        super().__init__(kv_caches)
        if self.format.name not in self._warned:
            self._warned.add(self.format.name)
            warnings.warn(f"{self.format.name} is deprecated", DeprecationWarning, stacklevel=2)

    @classmethod
    def _layer_axes(cls) -> tuple[str, ...]:
        return tuple(axis for axis in cls.axes() if axis != "TWO")

    def head_size(self, layer_idx: int = 0) -> int:
        return 2 * self.size("HS", layer_idx)

    def hidden_dim(self, layer_idx: int = 0) -> int:
        return self.num_heads(layer_idx) * self.size("HS", layer_idx)

    def _concrete(self, label: str) -> str:
        return str(self.size("HS")) if label == "HS" else super()._concrete(label)
