# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_NB_NH_ONE_BS_HS: vLLM for RBLN, with a singleton axis that its kernels need."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXTwoNbNhOneBsHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS
    producers = ("vLLM for RBLN",)

    @classmethod
    def _layer_axes(cls) -> tuple[str, ...]:
        """Rebuilt from a pointer, a layer has no use for the singleton."""
        return tuple(axis for axis in cls.axes() if axis != "ONE")
