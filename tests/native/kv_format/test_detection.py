# SPDX-License-Identifier: Apache-2.0
"""From what an engine registers to its format: every layer looked at, nothing guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semkv.native.layout import (
    AmbiguousLayoutError,
    EngineKVFormat,
    EngineType,
    LayoutError,
    LayoutHints,
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)
from tests.native.kv_format.shapes import canonical, registered, tensors

F = EngineKVFormat
VLLM, SGLANG, TRTLLM, ATOM = EngineType.VLLM, EngineType.SGLANG, EngineType.TRTLLM, EngineType.ATOM
NHD: LayoutHints = {"kv_layout": "NHD"}
HND: LayoutHints = {"kv_layout": "HND"}
GONE = (F.NL_X_NB_NH_BS_TWO_HS, F.NL_X_NB_BS_NH_TWO_HS)


def detect(cache: Any, engine: EngineType = VLLM, hints: LayoutHints | None = None) -> EngineKVFormat:
    return normalize_kv_and_discover_format(cache, engine, hints)[0]


def first_leaf(cache: Any) -> torch.Tensor:
    while not isinstance(cache, torch.Tensor):
        cache = cache[0]
    return cache


@pytest.mark.parametrize("fmt", [fmt for fmt in F if fmt not in GONE], ids=lambda fmt: fmt.name)
def test_every_format_that_an_engine_makes_is_found(fmt: EngineKVFormat) -> None:
    cache, engine, hints = registered(fmt)
    found, normalized = normalize_kv_and_discover_format(cache, engine, hints)
    assert found == fmt
    assert first_leaf(normalized).shape == first_leaf(canonical(fmt)).shape
    assert first_leaf(normalized).data_ptr() == first_leaf(cache).data_ptr()  # a view, not a copy


INDEXER = torch.uint8
CASES: list[tuple[Any, EngineType, LayoutHints, EngineKVFormat, tuple[int, ...]]] = [
    (torch.zeros(7, 5, 2, 3, 2, 4), VLLM, NHD, F.NB_NL_TWO_BS_NH_HS, (7, 5, 2, 3, 2, 4)),
    (torch.zeros(7, 5, 2, 2, 3, 4), VLLM, HND, F.NB_NL_TWO_NH_BS_HS, (7, 5, 2, 2, 3, 4)),
    (tensors(5, 2, 7, 3, 2, 4), VLLM, HND, F.NL_X_TWO_NB_NH_BS_HS, (2, 7, 3, 2, 4)),
    (tensors(5, 7, 2, 3, 2, 4), VLLM, NHD, F.NL_X_NB_TWO_BS_NH_HS, (7, 2, 3, 2, 4)),
    (tensors(5, 7, 3, 4), VLLM, {}, F.NL_X_NB_BS_HS, (7, 3, 4)),
    (tensors(5, 2, 7, 2, 1, 3, 4), VLLM, {}, F.NL_X_TWO_NB_NH_ONE_BS_HS, (2, 7, 2, 1, 3, 4)),
    (tensors(5, 2, 7, 2, 1, 3, 4), VLLM, NHD, F.NL_X_TWO_NB_NH_ONE_BS_HS, (2, 7, 2, 1, 3, 4)),
    (tensors(5, 7, 2, 3, 8), VLLM, HND, F.NL_X_NB_NH_BS_CS, (7, 2, 3, 8)),
    (tensors(5, 7, 3, 2, 8), VLLM, {"kv_layout": "LBNHC"}, F.NL_X_NB_BS_NH_CS, (7, 3, 2, 8)),
    (tensors(5, 7, 3, 132, dtype=INDEXER), VLLM, NHD, F.NL_X_NB_BSV_BSS, (7, 3, 132)),
    (tensors(5, 7, 1, 64, 132, dtype=INDEXER), VLLM, NHD, F.NL_X_NB_BSV_BSS, (7, 64, 132)),
    (tensors(5, 7, 64, 1, 132, dtype=INDEXER), VLLM, HND, F.NL_X_NB_BSV_BSS, (7, 64, 132)),
    # Latent rows with a head axis of one, on either side.
    (tensors(5, 7, 16, 1, 576), VLLM, {"use_mla": True}, F.NL_X_NB_BS_HS, (7, 16, 576)),
    (tensors(5, 7, 1, 16, 576), VLLM, {"use_mla": True}, F.NL_X_NB_BS_HS, (7, 16, 576)),
    (tensors(5, 21, 1, 4), SGLANG, {}, F.NL_X_NBBS_ONE_HS, (21, 1, 4)),
    (tensors(4, 21, 1, 4), SGLANG, {"use_mla": True}, F.NL_X_NBBS_ONE_HS, (21, 1, 4)),
    (tensors(5, 21, 1, 4), SGLANG, {"tokens_per_block": 3}, F.NL_X_NB_BS_HS, (7, 3, 4)),
    (tensors(10, 7, 3, 2, 4), SGLANG, {"kv_list_layout": "unified"}, F.NL_X_NB_BS_NH_HS, (7, 3, 2, 4)),
    (tensors(5, 7, 3, 4), SGLANG, {"kv_list_layout": "unified"}, F.NL_X_NB_BS_HS, (7, 3, 4)),
    ([tensors(5, 21, 2, 4), tensors(5, 21, 2, 4)], SGLANG, {}, F.TWO_X_NL_X_NBBS_NH_HS, (21, 2, 4)),
    ([tensors(5, 7, 3, 2, 4), tensors(5, 7, 3, 2, 4)], SGLANG, {}, F.TWO_X_NL_X_NB_BS_NH_HS, (7, 3, 2, 4)),
    (
        tensors(10, 21, 1, 4),
        SGLANG,
        {"kv_list_layout": "k_v", "tokens_per_block": 3},
        F.TWO_X_NL_X_NB_BS_NH_HS,
        (7, 3, 1, 4),
    ),
    (torch.zeros(7, 5, 2, 2, 3, 4), TRTLLM, {}, F.NB_NL_TWO_NH_BS_HS, (7, 5, 2, 2, 3, 4)),
    ([torch.zeros(7, 5, 2, 2, 3, 4)], TRTLLM, {}, F.NB_NL_TWO_NH_BS_HS, (7, 5, 2, 2, 3, 4)),
    (tensors(5, 7, 3, 4), ATOM, {}, F.NL_X_NB_BS_HS, (7, 3, 4)),
    (tensors(5, 7, 3, 132, dtype=INDEXER), ATOM, {}, F.NL_X_NB_BSV_BSS, (7, 3, 132)),
    ([tuple(tensors(3, 7, 3, 1, 8))], VLLM, {}, F.NL_X_NP_X_NB_BS_ONE_HS, (7, 3, 1, 8)),
    ([(torch.zeros(7, 3, 1, 32),)], VLLM, {}, F.NL_X_NP_X_NB_BS_ONE_HS, (7, 3, 1, 32)),
    ([tuple(tensors(2, 7, 3, 1, 4))], VLLM, {}, F.NL_X_TWO_X_NB_BS_NH_HS, (7, 3, 1, 4)),
    # K and V of different widths are a pair all the same.
    ([(torch.zeros(7, 3, 2, 192), torch.zeros(7, 3, 2, 128))], VLLM, {}, F.NL_X_TWO_X_NB_BS_NH_HS, (7, 3, 2, 192)),
    (
        [(torch.zeros(7, 3, 1, 192), torch.zeros(7, 3, 1, 128))],
        VLLM,
        {"use_mla": False},
        F.NL_X_TWO_X_NB_BS_NH_HS,
        (7, 3, 1, 192),
    ),
    # Two blocks: the axis of keys and values is named, or shown by the gap between blocks.
    (tensors(2, 2, 2, 3, 4, 8), VLLM, {"kv_layout": "NHD", "kv_axis": 1}, F.NL_X_NB_TWO_BS_NH_HS, (2, 2, 3, 4, 8)),
    (tensors(2, 2, 2, 3, 4, 8), VLLM, {"kv_layout": "NHD", "kv_axis": 0}, F.NL_X_TWO_NB_BS_NH_HS, (2, 2, 3, 4, 8)),
    ([torch.zeros(2, 4, 3, 4, 8)[:, ::2]], VLLM, NHD, F.NL_X_TWO_NB_BS_NH_HS, (2, 2, 3, 4, 8)),
    # One head: sizes decide where no layout is named.
    (tensors(2, 7, 1, 16, 8), VLLM, {"tokens_per_block": 16}, F.NL_X_NB_NH_BS_CS, (7, 1, 16, 8)),
    (tensors(2, 7, 16, 1, 8), VLLM, {"num_kv_heads": 1}, F.NL_X_NB_BS_NH_CS, (7, 16, 1, 8)),
    ({"a": torch.zeros(7, 3, 4), "b": torch.zeros(7, 3, 4)}, VLLM, {}, F.NL_X_NB_BS_HS, (7, 3, 4)),
    # Zero blocks and one padded block.
    (tensors(2, 0, 3, 4), VLLM, {}, F.NL_X_NB_BS_HS, (0, 3, 4)),
    (tensors(2, 2, 0, 3, 2, 4), VLLM, NHD, F.NL_X_TWO_NB_BS_NH_HS, (2, 0, 3, 2, 4)),
    ([torch.zeros(40).as_strided((1, 3, 8), (40, 8, 1))], VLLM, {}, F.NL_X_NB_BS_HS, (1, 3, 8)),
    # The 310P's pieces of 16.
    ([tuple(tensors(2, 7, 8, 128, 16))], VLLM, {"tokens_per_block": 128}, F.NL_X_TWO_X_NB_NZ_BS_C0, (7, 8, 128, 16)),
    ([tuple(tensors(2, 7, 8, 128, 16))], VLLM, {"head_dim": 128}, F.NL_X_TWO_X_NB_NZ_BS_C0, (7, 8, 128, 16)),
    ([tuple(tensors(2, 7, 128, 8, 16))], VLLM, NHD, F.NL_X_TWO_X_NB_BS_NH_HS, (7, 128, 8, 16)),
]


@pytest.mark.parametrize(("cache", "engine", "hints", "fmt", "shape"), CASES)
def test_found(cache: Any, engine: EngineType, hints: LayoutHints, fmt: EngineKVFormat, shape: tuple[int, ...]) -> None:
    found, normalized = normalize_kv_and_discover_format(cache, engine, hints)
    assert found == fmt
    assert first_leaf(normalized).shape == shape


AMBIGUOUS: list[tuple[Any, EngineType, LayoutHints, set[EngineKVFormat], str]] = [
    (tensors(5, 7, 3, 2, 8), VLLM, {}, {F.NL_X_NB_NH_BS_CS, F.NL_X_NB_BS_NH_CS}, "kv_layout"),
    (tensors(5, 2, 7, 3, 2, 8), VLLM, {}, {F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_TWO_NB_NH_BS_HS}, "kv_layout"),
    (torch.zeros(7, 5, 2, 3, 2, 4), VLLM, {}, {F.NB_NL_TWO_NH_BS_HS, F.NB_NL_TWO_BS_NH_HS}, "kv_layout"),
    (
        tensors(5, 2, 2, 3, 2, 4),
        VLLM,
        NHD,
        {F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_TWO_NB_NH_BS_HS, F.NL_X_NB_TWO_BS_NH_HS, F.NL_X_NB_TWO_NH_BS_HS},
        "kv_axis",
    ),
    (
        [(torch.zeros(7, 3, 1, 192), torch.zeros(7, 3, 1, 128))],
        VLLM,
        {},
        {F.NL_X_NP_X_NB_BS_ONE_HS, F.NL_X_TWO_X_NB_BS_NH_HS},
        "use_mla",
    ),
    ([tuple(tensors(2, 7, 8, 8, 16))], VLLM, {}, {F.NL_X_TWO_X_NB_NZ_BS_C0, F.NL_X_TWO_X_NB_BS_NH_HS}, "kv_layout"),
    (tensors(4, 21, 1, 4), SGLANG, {}, {F.NL_X_NBBS_ONE_HS, F.TWO_X_NL_X_NBBS_NH_HS}, "use_mla"),
    (tensors(4, 21, 1, 4), SGLANG, {"tokens_per_block": 3}, {F.NL_X_NB_BS_HS, F.TWO_X_NL_X_NB_BS_NH_HS}, "use_mla"),
]


@pytest.mark.parametrize(("cache", "engine", "hints", "candidates", "hint"), AMBIGUOUS)
def test_what_fits_several_formats_is_refused_by_their_names(
    cache: Any, engine: EngineType, hints: LayoutHints, candidates: set[EngineKVFormat], hint: str
) -> None:
    with pytest.raises(AmbiguousLayoutError) as caught:
        detect(cache, engine, hints)
    assert set(caught.value.candidates) == {fmt.name for fmt in candidates}
    assert caught.value.hint == hint
    assert all(fmt.name in str(caught.value) for fmt in candidates)
    assert repr(hint) in str(caught.value)


REFUSED: list[tuple[Any, EngineType, LayoutHints, str]] = [
    (tensors(5, 7, 4), VLLM, {}, r"layer 0: shape \(7, 4\)"),
    (tensors(5, 3, 7, 3, 2, 4), VLLM, NHD, "neither of the first two is 2"),
    (torch.zeros(7, 3, 4), VLLM, {}, "one tensor for all layers"),
    (torch.zeros(2, 7, 3, 2, 4), VLLM, NHD, "one tensor for all layers"),
    (tensors(5, 2, 7, 2, 3, 3, 4), VLLM, NHD, "has 6 axes but is not"),
    ([(torch.zeros(7, 3, 2, 4),)], VLLM, {}, "neither .K, V. nor latent"),
    ([tuple(tensors(4, 7, 3, 1, 8))], VLLM, {}, "4 planes"),
    (tensors(5, 7, 3, 2, 8), VLLM, {"kv_layout": "nhd"}, "kv_layout 'nhd' is none of"),  # type: ignore[dict-item]
    (tensors(5, 7, 3, 2, 8), VLLM, {"kv_layout": "NHD", "tokens_per_block": 2}, "contradicts"),
    (tensors(5, 7, 3, 2, 8), VLLM, {"tokens_per_block": 16}, "has no axes for"),
    (tensors(5, 2, 7, 3, 2, 4), VLLM, {"kv_layout": "NHD", "kv_axis": 1}, "kv_axis 1 is not 2 long"),
    # Every layer is looked at, not the first alone.
    ([*tensors(4, 2, 7, 3, 2, 4), torch.zeros(5, 7, 3, 2, 4)], VLLM, NHD, "layer 4"),
    ([*tensors(3, 7, 3, 4), torch.zeros(7, 3, 2, 4)], VLLM, HND, "layer 3 is NL_X_NB_NH_BS_CS"),
    ([torch.zeros(2, 2, 3, 2, 4), torch.zeros(2, 7, 3, 2, 4)], VLLM, NHD, "kv_axis"),
    ([torch.zeros(7, 3, 4), [torch.zeros(7, 3, 1, 4)] * 3], VLLM, {}, "layer 1 is NL_X_NP"),
    (torch.zeros(7, 3, 4), SGLANG, {}, "registers lists"),
    ([tensors(5, 21, 2, 4)] * 3, SGLANG, {}, "3 lists"),
    ([tensors(5, 21, 2, 4), tensors(4, 21, 2, 4)], SGLANG, {}, "equally long"),
    (tensors(5, 21, 2, 4), SGLANG, {}, "kv_list_layout 'k_v'"),
    (tensors(5, 21, 2, 4), SGLANG, {"kv_list_layout": "k_v"}, "equally many"),
    (tensors(10, 22, 1, 4), SGLANG, {"kv_list_layout": "k_v", "tokens_per_block": 3}, "22 slots are not whole blocks"),
    (torch.zeros(7, 5, 2, 24), TRTLLM, {"num_kv_heads": 2}, "needs the layout hints tokens_per_block, head_dim"),
    (
        torch.zeros(7, 5, 2, 25),
        TRTLLM,
        {"num_kv_heads": 2, "tokens_per_block": 3, "head_dim": 4},
        "is not num_kv_heads 2",
    ),
    (
        torch.zeros(7, 5, 1, 24),
        TRTLLM,
        {"num_kv_heads": 2, "tokens_per_block": 3, "head_dim": 4},
        "latent attention's pool",
    ),
    (torch.zeros(7, 5, 2, 2, 3), TRTLLM, {}, "4 or 6 axes"),
    ([torch.zeros(1)] * 2, TRTLLM, {}, "one pool"),
    (torch.zeros(7, 3, 4), ATOM, {}, "list of planes"),
    (tensors(2, 7, 3, 2, 4), ATOM, {}, "layer 0"),
    (tensors(2, 7, 3, 4), EngineType.MOCK, {}, "no KV cache detector"),
    ([], VLLM, {}, "empty list"),
    ({}, VLLM, {}, "empty list"),
    (["x"], VLLM, {}, "not of str"),
    ([torch.zeros(7, 3, 4), [[torch.zeros(7, 3, 4)]]], VLLM, {}, "layer 1"),
]


@pytest.mark.parametrize(("cache", "engine", "hints", "message"), REFUSED)
def test_refused(cache: Any, engine: EngineType, hints: LayoutHints, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        detect(cache, engine, hints)


def test_layers_of_a_blocks_first_pool() -> None:
    """Views into one tensor of all layers, blocks outermost: the same memory, with the pool's block stride."""
    for layout, shape, fmt in (
        ("BLHNC", (6, 3, 2, 4, 8), F.NL_X_NB_NH_BS_CS),
        ("BLNHC", (6, 3, 4, 2, 8), F.NL_X_NB_BS_NH_CS),
    ):
        pool = torch.zeros(shape)
        layers = [pool[:, index] for index in range(3)]
        found, normalized = normalize_kv_and_discover_format(layers, VLLM, {"kv_layout": layout})  # type: ignore[typeddict-item]
        assert found == fmt
        for before, after in zip(layers, normalized, strict=True):
            assert isinstance(after, torch.Tensor)
            assert (after.data_ptr(), after.shape, after.stride()) == (before.data_ptr(), before.shape, before.stride())
            assert after.stride(0) == 3 * 2 * 4 * 8


def test_a_gap_inside_a_block_is_refused() -> None:
    with pytest.raises(LayoutError, match="dim-0 padding only"):
        detect([torch.zeros(6, 2, 8, 8)[:, :, ::2]], VLLM, HND)
    # A gap after the axis of keys and values or of blocks is none inside a block.
    assert detect([torch.zeros(3, 7, 3, 2, 4)[::2]], VLLM, NHD) == F.NL_X_TWO_NB_BS_NH_HS
    assert detect([torch.zeros(2, 14, 3, 2, 4)[:, ::2]], VLLM, NHD) == F.NL_X_TWO_NB_BS_NH_HS
    # But one between the tokens of an MLA block, or of a head's tokens, is.
    with pytest.raises(LayoutError, match="dim-0 padding only"):
        detect([torch.zeros(7, 6, 4)[:, ::2]], VLLM, {})
    with pytest.raises(LayoutError, match="a gap inside"):
        detect([torch.zeros(7, 5, 2, 6, 3, 4)[:, :, :, ::2].squeeze()], VLLM, HND)


FORBIDDEN_GAPS: list[tuple[torch.Tensor, torch.Tensor, EngineType, LayoutHints]] = [
    # Between heads, where other formats of as many axes may have one between blocks.
    (torch.zeros(2, 7, 2, 1, 3, 4), torch.zeros(2, 7, 4, 1, 3, 4)[:, :, ::2], VLLM, {}),
    (torch.zeros(21, 1, 4), torch.zeros(42, 1, 4)[::2], SGLANG, {"use_mla": True}),  # between tokens
    (torch.zeros(6, 2, 32, 64), torch.zeros(6, 2, 64, 64)[:, :, ::2], VLLM, {"page_order": "opaque"}),
]


@pytest.mark.parametrize(("good", "gap", "engine", "hints"), FORBIDDEN_GAPS)
def test_a_gap_that_only_the_format_forbids(
    good: torch.Tensor, gap: torch.Tensor, engine: EngineType, hints: LayoutHints
) -> None:
    """In any layer, and also where layers have formats of their own."""
    assert detect([good, good.clone()], engine, hints)
    for number, layers in ((0, [gap, good]), (1, [good, gap])):
        with pytest.raises(LayoutError, match=rf"layer {number}: .*a gap inside a block"):
            detect(layers, engine, hints)


def test_a_gap_among_layers_of_several_formats() -> None:
    layers = [*tensors(1, 7, 3, 4), torch.zeros(2, 7, 4, 1, 3, 4)[:, :, ::2]]
    with pytest.raises(LayoutError, match="a gap inside a block"):
        normalize_and_discover_per_layer_formats(layers, [[0], [1]], VLLM)


def test_layers_of_several_formats() -> None:
    mixed = [*tensors(3, 2, 7, 3, 2, 4), *tensors(2, 7, 3, 4)]
    _, formats = normalize_and_discover_per_layer_formats(mixed, [[0, 1, 2], [3, 4]], VLLM, HND)
    assert formats == [F.NL_X_TWO_NB_NH_BS_HS] * 3 + [F.NL_X_NB_BS_HS] * 2
    widths = [*tensors(2, 7, 2, 3, 8), *tensors(3, 7, 2, 3, 16)]
    _, formats = normalize_and_discover_per_layer_formats(widths, [[0, 1], [2, 3, 4]], VLLM, HND)
    assert formats == [F.NL_X_NB_NH_BS_CS] * 5
    flat = tensors(10, 21, 2, 4)
    hints: LayoutHints = {"kv_list_layout": "k_v", "tokens_per_block": 3}
    whole, formats = normalize_and_discover_per_layer_formats(flat, [list(range(5))], SGLANG, hints)
    assert formats == [F.TWO_X_NL_X_NB_BS_NH_HS] * 5
    assert [len(half) for half in whole] == [5, 5]
    # Keys and values of two widths: each layer keeps its own.
    uneven = [tensors(1, 21, 2, 4) + tensors(1, 21, 2, 8)] * 2
    _, formats = normalize_and_discover_per_layer_formats(uneven, [[0], [1]], SGLANG)
    assert formats == [F.TWO_X_NL_X_NBBS_NH_HS] * 2
    # A layer that nobody transfers is left alone.
    state: list[Any] = [*tensors(2, 7, 3, 4), torch.zeros(3, 3)]
    normalized, formats = normalize_and_discover_per_layer_formats(state, [[0, 1], []], VLLM)
    assert normalized[2] is state[2]
    assert formats == [F.NL_X_NB_BS_HS] * 3
    with pytest.raises(LayoutError, match="layer 9"):
        normalize_and_discover_per_layer_formats(state, [[0, 9]], VLLM)
