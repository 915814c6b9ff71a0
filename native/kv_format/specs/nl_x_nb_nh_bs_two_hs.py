# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_NH_BS_TWO_HS: blocks with keys and values as an axis, heads first. Deprecated: nobody makes it any more."""

from __future__ import annotations

from semkv.native.kv_format.packed import DeprecatedPackedSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbNhBsTwoHs(DeprecatedPackedSpec):
    format = EngineKVFormat.NL_X_NB_NH_BS_TWO_HS
    producers = ("an early vLLM unified cache, heads first",)
