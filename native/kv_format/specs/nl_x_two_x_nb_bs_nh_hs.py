# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_X_NB_BS_NH_HS: vLLM-Ascend dense attention: (K, V) for each layer, whose widths may differ."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXTwoXNbBsNhHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS
    producers = ("vLLM-Ascend dense attention: (K, V) for each layer, whose widths may differ",)
