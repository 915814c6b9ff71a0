# SPDX-License-Identifier: Apache-2.0
"""TWO_X_NL_X_NB_BS_NH_HS: SGLang MHA in blocks."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class TwoXNlXNbBsNhHs(KVFormatSpec):
    format = EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS
    producers = ("SGLang MHA in blocks",)
