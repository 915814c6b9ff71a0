# SPDX-License-Identifier: Apache-2.0
"""TRT-LLM: one pool for all layers, its last axis to be cut into heads, tokens and head size by the hints."""

from __future__ import annotations

import torch

from semkv.native.kv_format.detector import EngineDetector, shape_of
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, EngineType, LayoutError, LayoutHints


class TrtllmDetector(EngineDetector):
    engine = EngineType.TRTLLM

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        pool = kv_caches[0] if isinstance(kv_caches, list) and len(kv_caches) == 1 else kv_caches
        if not isinstance(pool, torch.Tensor):
            raise LayoutError("TRT-LLM registers one pool, bare or alone in a list")
        if pool.dim() == 4:
            pool = _cut(pool, layout_hints)
        if pool.dim() != 6:
            raise LayoutError(f"a TRT-LLM pool has 4 or 6 axes, not the shape {shape_of(pool)}")
        if pool.shape[2] != 2:
            raise LayoutError(
                f"a TRT-LLM pool of shape {shape_of(pool)} has {pool.shape[2]} for keys and values, not 2; latent "
                "attention's pool is not supported"
            )
        return EngineKVFormat.NB_NL_TWO_NH_BS_HS, pool


def _cut(pool: torch.Tensor, hints: LayoutHints) -> torch.Tensor:
    sizes = {key: hints.get(key) for key in ("num_kv_heads", "tokens_per_block", "head_dim")}
    missing = [key for key, value in sizes.items() if value is None]
    if missing:
        raise LayoutError(
            f"a 4-axis TRT-LLM pool of shape {shape_of(pool)} needs the layout hints {', '.join(missing)}"
        )
    cut = tuple(int(str(value)) for value in sizes.values())
    if cut[0] * cut[1] * cut[2] != pool.shape[3]:
        raise LayoutError(
            f"the last axis of a TRT-LLM pool of shape {shape_of(pool)} is not num_kv_heads {cut[0]} * "
            f"tokens_per_block {cut[1]} * head_dim {cut[2]}"
        )
    return pool.unflatten(3, cut)
