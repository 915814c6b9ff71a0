# SPDX-License-Identifier: Apache-2.0
"""NL_X_NBBS_ONE_HS: SGLang MLA in process."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbbsOneHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NBBS_ONE_HS
    producers = ("SGLang MLA in process",)
