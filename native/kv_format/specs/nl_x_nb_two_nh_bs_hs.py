# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_TWO_NH_BS_HS: vLLM flash-infer, heads first (HND)."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbTwoNhBsHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_TWO_NH_BS_HS
    producers = ("vLLM flash-infer, heads first (HND)",)
