# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_PAGE: vLLM on a CPU since 0.26: pages declared [NH, BS, 2 * HS], packed inside as the CPU likes."""

from __future__ import annotations

from semkv.native.kv_format.opaque import OpaquePageSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbPage(OpaquePageSpec):
    format = EngineKVFormat.NL_X_NB_PAGE
    producers = ("vLLM on a CPU, 0.26 and newer",)
    declared = ("NB", "NH", "BS", "CS")
