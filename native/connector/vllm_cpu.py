# SPDX-License-Identifier: Apache-2.0
"""How vLLM's CPU build lays out its KV pages: which arrangement, block size and instruction set.

Read from the engine's configuration alone, so that the scheduler, which owns no pages, and the workers agree.
vLLM packs K inside a page for the instruction set at hand, so a page of a non-MLA model is opaque: it can be moved
whole and means nothing to an engine with another tag. The rows of latent attention are plain. Errors:
`EngineLayoutError` naming what was found.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

SPLIT = "NL_X_TWO_NB_PAGE"  # one tensor per layer, K pages then V pages
PACKED = "NL_X_NB_PAGE"  # one tensor per layer, K and V of a head inside one page
LATENT = "NL_X_NB_BS_HS"  # MLA: one latent row per token


class EngineLayoutError(ValueError):
    """The engine's KV layout is one that we cannot move safely."""


@dataclass(frozen=True)
class CpuLayout:
    """The layout of one engine's pages."""

    format: str
    block_size: int
    isa: str
    cache_dtype: str

    # Objects are whole blocks, tails filled up: only engines with the same blocks can read them, whatever is inside.
    opaque = True

    @property
    def tag(self) -> str:
        """The layout's name in hash domains and keys: only characters that are safe in file names and keys."""
        dtype = "" if self.cache_dtype == "auto" else f".{self.cache_dtype}"
        return f"{self.format.lower()}.b{self.block_size}.{self.isa}{dtype}"


def cpu_layout(vllm_config: Any) -> CpuLayout:
    """The layout that this vLLM will use on this CPU for this configuration."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if bool(getattr(model, "use_mla", False)):
        return CpuLayout(LATENT, cache.block_size, _mla_isa(vllm_config), str(cache.cache_dtype))
    from vllm.v1.attention.backends import cpu_attn

    # vLLM 0.18 declares the shape of its pages, later versions the family of layouts it can read.
    form = SPLIT if hasattr(cpu_attn.CPUAttentionBackend, "get_kv_cache_shape") else PACKED
    return CpuLayout(form, cache.block_size, _attention_isa(cpu_attn, vllm_config), str(cache.cache_dtype))


def _attention_isa(cpu_attn: Any, vllm_config: Any) -> str:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    ask = getattr(cpu_attn, "_get_attn_isa", None)
    if ask is None:
        raise EngineLayoutError(
            "this vLLM does not say for which instruction set its CPU pages are packed "
            "(vllm.v1.attention.backends.cpu_attn._get_attn_isa is gone): its KV cannot be shared safely"
        )
    known = {
        "dtype": model.dtype,
        "block_size": cache.block_size,
        "head_size": model.get_head_size(),
        "kv_cache_dtype": cache.cache_dtype,
    }
    return str(ask(**{name: known[name] for name in inspect.signature(ask).parameters if name in known}))


def _mla_isa(vllm_config: Any) -> str:
    """AMX's MLA kernels pack the page for themselves; the reference kernels keep rows as they are."""
    import torch

    amx = bool(torch.cpu._is_amx_tile_supported()) and vllm_config.cache_config.block_size % 32 == 0
    return "amx" if amx else "plain"
