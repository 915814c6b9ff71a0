# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_BS_NH_HS: SGLang unified: one tensor for each component, not for each model layer."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbBsNhHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_BS_NH_HS
    producers = ("SGLang unified: one tensor for each component, not for each model layer",)
