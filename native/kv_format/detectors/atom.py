# SPDX-License-Identifier: Apache-2.0
"""ATOM: latent planes and index planes, one tensor of three axes each."""

from __future__ import annotations

import torch

from semkv.native.kv_format.detector import EngineDetector, is_indexer, one_format, shape_of
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, EngineType, LayoutError, LayoutHints


class AtomDetector(EngineDetector):
    engine = EngineType.ATOM

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        if isinstance(kv_caches, torch.Tensor):
            raise LayoutError(f"ATOM registers a list of planes, not one tensor of shape {shape_of(kv_caches)}")
        formats = []
        for index, entry in enumerate(kv_caches):
            if not isinstance(entry, torch.Tensor) or entry.dim() != 3:
                raise LayoutError(f"layer {index}: ATOM's planes are [NB, BS, HS]")
            formats.append(EngineKVFormat.NL_X_NB_BSV_BSS if is_indexer(entry) else EngineKVFormat.NL_X_NB_BS_HS)
        return one_format(formats, kv_caches)
