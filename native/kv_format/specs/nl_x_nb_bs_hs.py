# SPDX-License-Identifier: Apache-2.0
"""NL_X_NB_BS_HS: vLLM MLA."""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbBsHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_BS_HS
    producers = (
        "vLLM MLA",
        "SGLang MLA in blocks",
        "ATOM latent and index planes",
    )
