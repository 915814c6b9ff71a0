# SPDX-License-Identifier: Apache-2.0
"""NB_NL_TWO_BS_NH_HS: vLLM, one tensor for all layers, tokens first."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NbNlTwoBsNhHs(KVFormatSpec):
    format = EngineKVFormat.NB_NL_TWO_BS_NH_HS
    producers = ("vLLM, one tensor for all layers, tokens first",)
