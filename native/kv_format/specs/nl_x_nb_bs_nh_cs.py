# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_BS_NH_CS: vLLM's unified cache, tokens first."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbBsNhCs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_BS_NH_CS
    producers = ("vLLM's unified cache, tokens first",)
