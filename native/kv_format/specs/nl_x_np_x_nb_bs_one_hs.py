# SPDX-License-Identifier: Apache-2.0
"""NL_X_NP_X_NB_BS_ONE_HS: vLLM-Ascend's latent attention, planes of different widths and types.

Latent and rope (MLA), with indexer keys and their scales (DSA), or the latent alone. In an object a token's row is the
planes' bytes one after the other.
"""

from __future__ import annotations

from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat, LayoutError


class NlXNpXNbBsOneHs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS
    producers = ("vLLM-Ascend MLA (latent, rope)", "vLLM-Ascend DSA (latent, rope, indexer keys, scales)")

    def head_size(self, layer_idx: int = 0) -> int:
        """A token's bytes over all planes, counted in elements of the first."""
        planes = self.layer_tensors(layer_idx)
        total = sum(int(plane.shape[-1]) * int(plane.element_size()) for plane in planes)
        unit = int(planes[0].element_size())
        if total % unit:
            raise LayoutError(
                f"{self.format.name}, layer {layer_idx}: a token has {total} bytes over {len(planes)} planes, which is "
                f"not a whole number of the first plane's {unit}-byte elements"
            )
        return total // unit

    def _concrete(self, label: str) -> str:
        return "NP" if label == "NP" else super()._concrete(label)
