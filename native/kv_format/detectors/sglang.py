# SPDX-License-Identifier: Apache-2.0
"""SGLang: a list of keys and a list of values, or one flat list whose meaning the engine must say."""

from __future__ import annotations

import torch

from semkv.native.kv_format.detector import EngineDetector, is_indexer, one_format, shape_of
from semkv.native.kv_format.types import (
    AmbiguousLayoutError,
    DiscoverableKVCache,
    EngineKVFormat,
    EngineType,
    LayoutError,
    LayoutHints,
)

F = EngineKVFormat


class SglangDetector(EngineDetector):
    engine = EngineType.SGLANG

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        if isinstance(kv_caches, torch.Tensor):
            raise LayoutError(f"SGLang registers lists, not one tensor of shape {shape_of(kv_caches)}")
        flat = [entry for entry in kv_caches if isinstance(entry, torch.Tensor)]
        how = layout_hints.get("kv_list_layout")
        if how not in (None, "k_v", "unified"):
            raise LayoutError(f"kv_list_layout {how!r} is neither 'k_v' nor 'unified'")
        if len(flat) != len(kv_caches):
            return self._nested(kv_caches)
        if how == "unified":
            return self._unified(flat)
        if how == "k_v":
            return self._halves(flat, layout_hints)
        return self._latent(flat, layout_hints)

    def _nested(self, kv_caches: list[DiscoverableKVCache]) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        halves = [half for half in kv_caches if isinstance(half, list)]
        if len(kv_caches) != 2 or len(halves) != 2 or len(halves[0]) != len(halves[1]):
            raise LayoutError(
                f"nested lists must be one of keys and one of values, equally long, not {len(kv_caches)} lists of "
                f"{[len(half) for half in halves]}"
            )
        tensors = [entry for half in halves for entry in half if isinstance(entry, torch.Tensor)]
        ranks = {tensor.dim() for tensor in tensors}
        formats = {3: F.TWO_X_NL_X_NBBS_NH_HS, 4: F.TWO_X_NL_X_NB_BS_NH_HS}
        if len(tensors) != 2 * len(halves[0]) or len(ranks) != 1 or not ranks <= set(formats):
            raise LayoutError(
                f"keys and values must all be [PBS, NH, HS] or all [NB, BS, NH, HS], not of ranks {ranks}"
            )
        return formats[ranks.pop()], kv_caches

    def _unified(self, flat: list[torch.Tensor]) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        formats = {3: F.NL_X_NB_BS_HS, 4: F.NL_X_NB_BS_NH_HS}
        for index, tensor in enumerate(flat):
            if tensor.dim() not in formats:
                raise LayoutError(
                    f"component {index}: shape {shape_of(tensor)} is neither [NB, BS, HS] nor [NB, BS, NH, HS]"
                )
        found = [F.NL_X_NB_BSV_BSS if t.dim() == 3 and is_indexer(t) else formats[t.dim()] for t in flat]
        return one_format(found, list(flat))

    def _halves(self, flat: list[torch.Tensor], hints: LayoutHints) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        if len(flat) % 2:
            raise LayoutError(f"kv_list_layout 'k_v' with {len(flat)} tensors: keys and values must be equally many")
        for index, tensor in enumerate(flat):
            if tensor.dim() != 3:
                raise LayoutError(f"tensor {index}: shape {shape_of(tensor)} is not [PBS, NH, HS]")
        half, tokens = len(flat) // 2, hints.get("tokens_per_block")
        if tokens is None:
            return F.TWO_X_NL_X_NBBS_NH_HS, [list(flat[:half]), list(flat[half:])]
        blocks: list[DiscoverableKVCache] = [
            tensor.unflatten(0, (_blocks(tensor, tokens, index), tokens)) for index, tensor in enumerate(flat)
        ]
        return F.TWO_X_NL_X_NB_BS_NH_HS, [blocks[:half], blocks[half:]]

    def _latent(self, flat: list[torch.Tensor], hints: LayoutHints) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        for index, tensor in enumerate(flat):
            if tensor.dim() != 3 or tensor.shape[1] != 1:
                raise LayoutError(
                    f"tensor {index}: shape {shape_of(tensor)} is not a latent [PBS, 1, HS]; a flat list of keys and "
                    "values needs the layout hint kv_list_layout 'k_v'"
                )
        tokens = hints.get("tokens_per_block")
        if len(flat) % 2 == 0 and not hints.get("use_mla"):
            # Keys and values of one head look just so; an odd number of tensors cannot be keys and values.
            pair = F.TWO_X_NL_X_NBBS_NH_HS if tokens is None else F.TWO_X_NL_X_NB_BS_NH_HS
            latent = F.NL_X_NBBS_ONE_HS if tokens is None else F.NL_X_NB_BS_HS
            hint = "use_mla" if hints.get("use_mla") is None else "kv_list_layout"
            raise AmbiguousLayoutError(f"{len(flat)} tensors like {shape_of(flat[0])}", (latent, pair), hint)
        if tokens is None:
            return F.NL_X_NBBS_ONE_HS, list(flat)
        return F.NL_X_NB_BS_HS, [
            tensor.squeeze(1).unflatten(0, (_blocks(tensor, tokens, index), tokens))
            for index, tensor in enumerate(flat)
        ]


def _blocks(tensor: torch.Tensor, tokens: int, index: int) -> int:
    slots = int(tensor.shape[0])
    if tokens <= 0 or slots % tokens:
        raise LayoutError(f"tensor {index}: {slots} slots are not whole blocks of tokens_per_block {tokens}")
    return slots // tokens
