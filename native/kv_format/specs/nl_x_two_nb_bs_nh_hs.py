# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_NB_BS_NH_HS: vLLM flash attention, tokens first (NHD)."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXTwoNbBsNhHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    producers = ("vLLM flash attention, tokens first (NHD)",)
