# SPDX-License-Identifier: Apache-2.0
"""What a transfer must do, slowly and obviously: one token, one head at a time, by indexing named axes.

Written from the formats' names, without the planes that the fast transfers use.
"""

from __future__ import annotations

from typing import Any

import torch

from semkv.native.kv_format.spec import parse_name
from semkv.native.layout import EngineKVFormat

F = EngineKVFormat


def token_parts(
    cache: Any, fmt: EngineKVFormat, layer: int, block: int, offset: int, bs: int
) -> list[list[torch.Tensor]]:
    """The bytes of one token in one layer: for each of the object's segments (K, V, or both in one) its pieces.

    Every piece is a view of the page's own bytes, so that it can be read and written.
    """
    if fmt == F.NL_X_NB_BSV_BSS:
        page = cache[layer][block].reshape(-1)
        return [[page[offset * 128 : offset * 128 + 128], page[bs * 128 + offset * 4 : bs * 128 + offset * 4 + 4]]]
    levels, axes = parse_name(fmt.name)
    packed = axes[-2:] == ("TWO", "HS")
    if levels == ():
        tensors = [cache]
    elif levels[0] == "TWO":
        tensors = [cache[0][layer], cache[1][layer]]
    elif len(levels) == 2:
        tensors = list(cache[layer])
    else:
        tensors = [cache[layer]]
    two_axis = "TWO" in axes and not packed
    halves = [(tensor, half) for tensor in tensors for half in (range(2) if two_axis else [None])]
    parts = [_pieces(tensor, axes, layer, block, offset, bs, half) for tensor, half in halves]
    inside = two_axis and {"BS", "NBBS"} & set(axes[: axes.index("TWO")])  # both halves are in a token's row
    split = (two_axis and not inside) or "TWO" in levels
    return parts if split else [[piece for part in parts for piece in part]]


def _pieces(tensor: torch.Tensor, axes: tuple[str, ...], *where: Any) -> list[torch.Tensor]:
    layer, block, offset, bs, half = where
    heads_axis = next((axis for axis in ("NH", "NZ") if axis in axes), None)
    heads = tensor.shape[axes.index(heads_axis)] if heads_axis else 1
    pieces = []
    for head in range(heads):
        chosen: dict[str, Any] = {
            "NL": layer,
            "NB": block,
            "BS": offset,
            "NBBS": block * bs + offset,
            "NH": head,
            "NZ": head,
            "ONE": 0,
        }
        if half is not None:
            chosen["TWO"] = half
        piece = tensor[tuple(chosen.get(axis, slice(None)) for axis in axes)]
        pieces += [piece[0], piece[1]] if piece.dim() == 2 else [piece]
    return [piece.view(torch.uint8) for piece in pieces]


def rows(cache: Any, fmt: EngineKVFormat, layers: int, bs: int, slots: list[int]) -> torch.Tensor:
    """The object of these slots: [kv][layer][token][row] bytes."""
    segments: dict[tuple[int, int], list[torch.Tensor]] = {}
    for slot in slots:
        for layer in range(layers):
            for kv, pieces in enumerate(token_parts(cache, fmt, layer, slot // bs, slot % bs, bs)):
                segments.setdefault((kv, layer), []).append(torch.cat(list(pieces)))
    return torch.cat([torch.cat(segments[key]) for key in sorted(segments)])


def blocks(cache: Any, fmt: EngineKVFormat, ids: list[int]) -> torch.Tensor:
    """The object of these opaque blocks: [kv][layer][block] bytes."""
    halves = range(2) if fmt == F.NL_X_TWO_NB_PAGE else [None]
    parts = []
    for half in halves:
        for tensor in cache:
            pages = tensor if half is None else tensor[half]
            parts += [pages[block].contiguous().view(torch.uint8).reshape(-1) for block in ids]
    return torch.cat(parts)
