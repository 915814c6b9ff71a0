# SPDX-License-Identifier: Apache-2.0
"""KV caches of every format at the golden sizes, and the way each engine hands them in."""

from __future__ import annotations

from typing import Any

import torch

from semkv.native.layout import EngineKVFormat, EngineType, LayoutHints

NB, NL, BS, NH, HS = 7, 5, 3, 2, 4
PBS = NB * BS
F = EngineKVFormat
TUPLES = (F.NL_X_NP_X_NB_BS_ONE_HS, F.NL_X_TWO_X_NB_NZ_BS_C0, F.NL_X_TWO_X_NB_BS_NH_HS)
HEADS_FIRST = (F.NL_X_TWO_NB_NH_BS_HS, F.NL_X_NB_TWO_NH_BS_HS, F.NL_X_NB_NH_BS_CS)


def tensors(count: int, *shape: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def canonical(fmt: EngineKVFormat) -> Any:
    """KV caches as detection returns them."""
    simple = {
        F.NL_X_TWO_NB_BS_NH_HS: (2, NB, BS, NH, HS),
        F.NL_X_NB_TWO_BS_NH_HS: (NB, 2, BS, NH, HS),
        F.NL_X_NB_BS_HS: (NB, BS, HS),
        F.NL_X_NBBS_ONE_HS: (PBS, 1, HS),
        F.NL_X_TWO_NB_NH_BS_HS: (2, NB, NH, BS, HS),
        F.NL_X_NB_TWO_NH_BS_HS: (NB, 2, NH, BS, HS),
        F.NL_X_NB_NH_BS_TWO_HS: (NB, NH, BS, 2, HS),
        F.NL_X_NB_BS_NH_TWO_HS: (NB, BS, NH, 2, HS),
        F.NL_X_NB_NH_BS_CS: (NB, NH, BS, 2 * HS),
        F.NL_X_NB_BS_NH_CS: (NB, BS, NH, 2 * HS),
        F.NL_X_TWO_NB_NH_ONE_BS_HS: (2, NB, NH, 1, BS, HS),
        F.NL_X_NB_BS_NH_HS: (NB, BS, NH, HS),
        F.NL_X_NB_PAGE: (NB, NH, BS, 2 * HS),
        F.NL_X_TWO_NB_PAGE: (2, NB, NH, BS, HS),
    }
    if fmt in simple:
        return tensors(NL, *simple[fmt])
    return {
        F.NB_NL_TWO_BS_NH_HS: lambda: torch.zeros(NB, NL, 2, BS, NH, HS, dtype=torch.float16),
        F.NB_NL_TWO_NH_BS_HS: lambda: torch.zeros(NB, NL, 2, NH, BS, HS, dtype=torch.float16),
        F.TWO_X_NL_X_NBBS_NH_HS: lambda: [tensors(NL, PBS, NH, HS), tensors(NL, PBS, NH, HS)],
        F.TWO_X_NL_X_NB_BS_NH_HS: lambda: [tensors(NL, NB, BS, NH, HS), tensors(NL, NB, BS, NH, HS)],
        F.NL_X_NB_BSV_BSS: lambda: tensors(NL, NB, BS, 132, dtype=torch.uint8),
        F.NL_X_TWO_X_NB_BS_NH_HS: lambda: [tensors(2, NB, BS, NH, HS) for _ in range(NL)],
        F.NL_X_NP_X_NB_BS_ONE_HS: lambda: [[*tensors(1, NB, BS, 1, 32), *tensors(1, NB, BS, 1, 4)] for _ in range(NL)],
        F.NL_X_TWO_X_NB_NZ_BS_C0: lambda: [tensors(2, NB, NH * 2, BS, 16) for _ in range(NL)],
    }[fmt]()


def registered(fmt: EngineKVFormat) -> tuple[Any, EngineType, LayoutHints]:
    """KV caches as the engine hands them in, the engine, and the hints it gives."""
    cache = canonical(fmt)
    nhd: LayoutHints = {"kv_layout": "NHD"}
    hnd: LayoutHints = {"kv_layout": "HND"}
    layers = [tuple(layer) for layer in cache] if fmt in TUPLES else cache
    if fmt == F.NB_NL_TWO_NH_BS_HS:
        layers = [cache.reshape(NB, NL, 2, NH * BS * HS)]
    elif fmt == F.TWO_X_NL_X_NB_BS_NH_HS:
        layers = [tensor.reshape(PBS, NH, HS) for half in cache for tensor in half]
    engines: dict[EngineKVFormat, tuple[EngineType, LayoutHints]] = {
        F.NL_X_NB_PAGE: (EngineType.VLLM, {"page_order": "opaque"}),
        F.NL_X_TWO_NB_PAGE: (EngineType.VLLM, {"page_order": "opaque"}),
        F.NB_NL_TWO_NH_BS_HS: (EngineType.TRTLLM, {"num_kv_heads": NH, "tokens_per_block": BS, "head_dim": HS}),
        F.NL_X_NP_X_NB_BS_ONE_HS: (EngineType.VLLM, {"use_mla": True}),
        F.NL_X_TWO_X_NB_NZ_BS_C0: (EngineType.VLLM, {"kv_layout": "NZ"}),
        F.NL_X_TWO_X_NB_BS_NH_HS: (EngineType.VLLM, {}),
        F.NL_X_NB_BS_NH_HS: (EngineType.SGLANG, {"kv_list_layout": "unified"}),
        F.TWO_X_NL_X_NB_BS_NH_HS: (EngineType.SGLANG, {"kv_list_layout": "k_v", "tokens_per_block": BS}),
        F.TWO_X_NL_X_NBBS_NH_HS: (EngineType.SGLANG, {}),
        F.NL_X_NBBS_ONE_HS: (EngineType.SGLANG, {}),
    }
    return layers, *engines.get(fmt, (EngineType.VLLM, hnd if fmt in HEADS_FIRST else nhd))
