# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_TWO_BS_NH_HS: vLLM flash-infer, tokens first (NHD)."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbTwoBsNhHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
    producers = ("vLLM flash-infer, tokens first (NHD)",)
