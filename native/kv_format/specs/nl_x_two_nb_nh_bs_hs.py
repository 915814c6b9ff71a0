# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_NB_NH_BS_HS: vLLM flash attention, heads first (HND)."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXTwoNbNhBsHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_TWO_NB_NH_BS_HS
    producers = ("vLLM flash attention, heads first (HND)",)
