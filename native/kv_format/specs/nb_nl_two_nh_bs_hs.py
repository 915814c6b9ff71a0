# SPDX-License-Identifier: Apache-2.0
"""NB_NL_TWO_NH_BS_HS: TRT-LLM."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NbNlTwoNhBsHs(KVFormatSpec):
    format = EngineKVFormat.NB_NL_TWO_NH_BS_HS
    producers = (
        "TRT-LLM",
        "vLLM, one tensor for all layers, heads first",
    )
