# SPDX-License-Identifier: Apache-2.0
"""vLLM and its platforms (Ascend, RBLN, CPU): one tensor a layer, a tuple of planes a layer, or one tensor for all."""

from __future__ import annotations

import torch

from semkv.native.kv_format.detector import (
    EngineDetector,
    heads_first,
    is_indexer,
    layout_named,
    one_format,
    shape_of,
)
from semkv.native.kv_format.types import (
    AmbiguousLayoutError,
    DiscoverableKVCache,
    EngineKVFormat,
    EngineType,
    LayoutError,
    LayoutHints,
)

F = EngineKVFormat
NZ_WIDTH = 16


class VllmDetector(EngineDetector):
    engine = EngineType.VLLM

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat, DiscoverableKVCache]:
        layout_named(layout_hints)  # an unknown name is refused even where it would not be asked
        if isinstance(kv_caches, torch.Tensor):
            return self._cross_layer(kv_caches, layout_hints), kv_caches
        formats = [self._layer(entry, layout_hints, index) for index, entry in enumerate(kv_caches)]
        normalized: DiscoverableKVCache = [
            _canonical(entry, fmt) for entry, fmt in zip(kv_caches, formats, strict=True)
        ]
        return one_format(formats, normalized)

    def _cross_layer(self, tensor: torch.Tensor, hints: LayoutHints) -> EngineKVFormat:
        shape = shape_of(tensor)
        if len(shape) != 6 or shape[2] != 2:
            raise LayoutError(
                f"one tensor for all layers must be [NB, NL, 2, ...] with 6 axes, not {shape}; layers come in a list"
            )
        pair = (F.NB_NL_TWO_NH_BS_HS, F.NB_NL_TWO_BS_NH_HS)
        return pair[0] if heads_first(tensor, hints, pair, "cross-layer tensor") else pair[1]

    def _layer(self, entry: DiscoverableKVCache, hints: LayoutHints, index: int) -> EngineKVFormat:
        where = f"layer {index}"
        if isinstance(entry, list):
            return self._planes(entry, hints, where)
        if hints.get("page_order") == "opaque":
            return _opaque(entry, where)
        rules = {3: self._rank3, 4: self._rank4, 5: self._rank5, 6: self._rank6}
        if entry.dim() not in rules:
            raise LayoutError(f"{where}: shape {shape_of(entry)} is none that vLLM registers")
        return rules[entry.dim()](entry, hints, where)

    def _rank3(self, tensor: torch.Tensor, hints: LayoutHints, where: str) -> EngineKVFormat:
        return F.NL_X_NB_BSV_BSS if is_indexer(tensor) else F.NL_X_NB_BS_HS

    def _rank4(self, tensor: torch.Tensor, hints: LayoutHints, where: str) -> EngineKVFormat:
        if is_indexer(tensor) and 1 in shape_of(tensor)[1:3]:  # the head axis, on whichever side it was put
            return F.NL_X_NB_BSV_BSS
        if hints.get("use_mla") and 1 in shape_of(tensor)[1:3]:  # vLLM 0.32 shows a latent row as one head
            return F.NL_X_NB_BS_HS
        pair = (F.NL_X_NB_NH_BS_CS, F.NL_X_NB_BS_NH_CS)
        return pair[0] if heads_first(tensor, hints, pair, where) else pair[1]

    def _rank5(self, tensor: torch.Tensor, hints: LayoutHints, where: str) -> EngineKVFormat:
        axis = _kv_axis(tensor, hints, where)
        pair = (
            (F.NL_X_TWO_NB_NH_BS_HS, F.NL_X_TWO_NB_BS_NH_HS)
            if axis == 0
            else (F.NL_X_NB_TWO_NH_BS_HS, F.NL_X_NB_TWO_BS_NH_HS)
        )
        return pair[0] if heads_first(tensor, hints, pair, where) else pair[1]

    def _rank6(self, tensor: torch.Tensor, hints: LayoutHints, where: str) -> EngineKVFormat:
        shape = shape_of(tensor)
        if shape[0] == 2 and shape[3] == 1:
            return F.NL_X_TWO_NB_NH_ONE_BS_HS
        raise LayoutError(f"{where}: shape {shape} has 6 axes but is not [2, NB, NH, 1, BS, HS]")

    def _planes(self, planes: list[DiscoverableKVCache], hints: LayoutHints, where: str) -> EngineKVFormat:
        tensors = [plane for plane in planes if isinstance(plane, torch.Tensor)]
        shapes = [shape_of(tensor) for tensor in tensors]
        if len(tensors) != len(planes) or any(len(shape) != 4 for shape in shapes):
            raise LayoutError(f"{where}: a tuple of planes must hold 4-axis tensors, not {shapes or 'lists'}")
        if _is_nz(tensors, hints, where):
            return F.NL_X_TWO_X_NB_NZ_BS_C0
        one_head = all(shape[2] == 1 for shape in shapes)
        if len(planes) == 2:
            if one_head and shapes[0][3] != shapes[1][3]:
                return _latent_or_pair(shapes, hints, where)
            return F.NL_X_TWO_X_NB_BS_NH_HS
        if one_head and (len(planes) in (1, 3) or len({shape[3] for shape in shapes}) > 1):
            return F.NL_X_NP_X_NB_BS_ONE_HS
        raise LayoutError(f"{where}: {len(planes)} planes of shapes {shapes} are neither (K, V) nor latent planes")


def _opaque(tensor: torch.Tensor, where: str) -> EngineKVFormat:
    shape = shape_of(tensor)
    if len(shape) == 4:
        return F.NL_X_NB_PAGE
    if len(shape) == 5 and shape[0] == 2:
        return F.NL_X_TWO_NB_PAGE
    raise LayoutError(f"{where}: opaque pages are [NB, NH, BS, 2*HS] or [2, NB, NH, BS, HS], not {shape}")


def _kv_axis(tensor: torch.Tensor, hints: LayoutHints, where: str) -> int:
    """Which of the first two axes of a 5-axis tensor holds keys and values."""
    shape = shape_of(tensor)
    axes = [axis for axis in (0, 1) if shape[axis] == 2]
    if not axes:
        raise LayoutError(f"{where}: shape {shape} has 5 axes, and neither of the first two is 2 for keys and values")
    named = hints.get("kv_axis")
    if named is not None:
        if named not in axes:
            raise LayoutError(f"{where}: kv_axis {named} is not 2 long in shape {shape}")
        return named
    if len(axes) == 1:
        return axes[0]
    block = shape[2] * shape[3] * shape[4]
    if tensor.numel() and tensor.stride(1) > block:
        return 0  # a gap after axis 1 is a gap between blocks: keys and values of one block lie side by side
    raise AmbiguousLayoutError(
        f"{where}: shape {shape}, with 2 blocks or 2 for keys and values on either side,",
        (F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_TWO_NB_NH_BS_HS, F.NL_X_NB_TWO_BS_NH_HS, F.NL_X_NB_TWO_NH_BS_HS),
        "kv_axis",
    )


def _latent_or_pair(shapes: list[tuple[int, ...]], hints: LayoutHints, where: str) -> EngineKVFormat:
    """Two planes of one head and different widths: latent and rope, or the K and V of a model that has them differ."""
    latent = hints.get("use_mla")
    if latent is None:
        raise AmbiguousLayoutError(
            f"{where}: planes of shapes {shapes[0]} and {shapes[1]}",
            (F.NL_X_NP_X_NB_BS_ONE_HS, F.NL_X_TWO_X_NB_BS_NH_HS),
            "use_mla",
        )
    return F.NL_X_NP_X_NB_BS_ONE_HS if latent else F.NL_X_TWO_X_NB_BS_NH_HS


def _is_nz(tensors: list[torch.Tensor], hints: LayoutHints, where: str) -> bool:
    """(K, V) of the 310P, [NB, NH*HS/16, BS, 16], against plain [NB, BS, NH, 16]."""
    if len(tensors) != 2 or any(tensor.shape[3] != NZ_WIDTH for tensor in tensors):
        return False
    if hints.get("kv_layout") is not None:
        return hints.get("kv_layout") == "NZ"
    pieces, tokens = int(tensors[0].shape[1]), int(tensors[0].shape[2])
    known = hints.get("tokens_per_block")
    if known is not None and pieces != tokens and known in (pieces, tokens):
        return known == tokens
    width = hints.get("head_dim")
    if width is not None:
        return width != NZ_WIDTH
    raise AmbiguousLayoutError(
        f"{where}: planes of shape {shape_of(tensors[0])}",
        (F.NL_X_TWO_X_NB_NZ_BS_C0, F.NL_X_TWO_X_NB_BS_NH_HS),
        "kv_layout",
    )


def _canonical(entry: DiscoverableKVCache, fmt: EngineKVFormat) -> DiscoverableKVCache:
    """An indexer's or a latent page loses its head axis of one; all else stays as it is."""
    if fmt in (F.NL_X_NB_BSV_BSS, F.NL_X_NB_BS_HS) and isinstance(entry, torch.Tensor) and entry.dim() == 4:
        return entry.squeeze(2 if entry.shape[2] == 1 else 1)
    return entry
