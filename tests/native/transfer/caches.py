# SPDX-License-Identifier: Apache-2.0
"""KV caches of any format filled with noise, with gaps between blocks where a format can have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from semkv.native.kv_format.spec import parse_name
from semkv.native.layout import EngineKVFormat

F = EngineKVFormat
_random = torch.Generator().manual_seed(5)


@dataclass
class Sizes:
    nb: int
    nl: int
    bs: int
    nh: int
    hs: int
    dtype: torch.dtype
    padding: int  # blocks left out between blocks, where the format has blocks as an axis
    widths: tuple[int, ...] = (5, 3)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, wide, dtype=torch.uint8, generator=_random).view(dtype)


def page(axes: tuple[str, ...], s: Sizes, width: int | None = None) -> torch.Tensor:
    size = {"NB": s.nb, "NL": s.nl, "BS": s.bs, "NH": s.nh, "TWO": 2, "ONE": 1, "NBBS": s.nb * s.bs, "CS": 2 * s.hs}
    size |= {"HS": width or s.hs, "NZ": s.nh, "C0": 16}
    step = s.padding + 1
    shape = tuple(size[axis] * (step if axis == "NB" else 1) for axis in axes)
    tensor = noise(shape, s.dtype)
    return tensor[tuple(slice(None, None, step) if axis == "NB" else slice(None) for axis in axes)]


def build(fmt: EngineKVFormat, s: Sizes) -> Any:
    levels, axes = parse_name(fmt.name)
    if fmt == F.NL_X_NB_BSV_BSS:
        return [noise((s.nb * (s.padding + 1), s.bs, 132), torch.uint8)[:: s.padding + 1] for _ in range(s.nl)]
    axes = {F.NL_X_NB_PAGE: ("NB", "NH", "BS", "CS")}.get(fmt, axes)
    axes = {F.NL_X_TWO_NB_PAGE: ("TWO", "NB", "NH", "BS", "HS")}.get(fmt, axes)
    kinds: dict[tuple[str, ...], Callable[[], Any]] = {
        (): lambda: page(axes, s),
        ("NL",): lambda: [page(axes, s) for _ in range(s.nl)],
        ("TWO", "NL"): lambda: [[page(axes, s) for _ in range(s.nl)] for _ in range(2)],
        ("NL", "TWO"): lambda: [[page(axes, s), page(axes, s, s.hs + 1)] for _ in range(s.nl)],
        ("NL", "NP"): lambda: [[page(axes, s, width) for width in s.widths] for _ in range(s.nl)],
    }
    return kinds[levels]()


def clone(cache: Any) -> Any:
    """The same strides, other memory."""
    if isinstance(cache, torch.Tensor):
        fresh = torch.zeros(cache.untyped_storage().nbytes(), dtype=torch.uint8).view(cache.dtype)
        return fresh.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return [clone(entry) for entry in cache]
