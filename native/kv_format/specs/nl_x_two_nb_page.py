# SPDX-License-Identifier: Apache-2.0
"""NL_X_TWO_NB_PAGE: vLLM on a CPU up to 0.25: pages of K, then pages of V, packed inside as the CPU likes them."""

from __future__ import annotations

from semkv.native.kv_format.opaque import OpaquePageSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXTwoNbPage(OpaquePageSpec):
    format = EngineKVFormat.NL_X_TWO_NB_PAGE
    producers = ("vLLM on a CPU, up to 0.25",)
    declared = ("TWO", "NB", "NH", "BS", "HS")
