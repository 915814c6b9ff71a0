# SPDX-License-Identifier: Apache-2.0
"""What LMCache 0.5.6 gets wrong about KV layouts, one test each, and what happens here instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semkv.native import layout
from semkv.native.layout import (
    AmbiguousLayoutError,
    AttnWindowDesc,
    EngineKVFormat,
    EngineType,
    KVLayerGroupsManager,
    LayoutError,
    LayoutHints,
)
from semkv.native.transfer.cpu import BlockTransfer, RowTransfer
from tests.native.kv_format.shapes import BS, NB, NL, canonical, tensors
from tests.native.transfer import reference
from tests.native.transfer.caches import Sizes, build, clone, noise

F = EngineKVFormat
WITH_BLOCKS = [fmt for fmt in F if "NB" in fmt.name.split("_X_")[-1].split("_")]
VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG
NHD: LayoutHints = {"kv_layout": "NHD"}
HND: LayoutHints = {"kv_layout": "HND"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def found(cache: Any, hints: LayoutHints, engine: EngineType = VLLM) -> tuple[F, Any]:
    return layout.normalize_kv_and_discover_format(cache, engine, hints)


def assert_moves(fmt: EngineKVFormat, s: Sizes, slots: list[int]) -> None:
    """Token by token there and back as the reference says, and nothing else in the pages is touched."""
    cache = build(fmt, s)
    rows = RowTransfer(cache, fmt, block_size=s.bs)
    obj = torch.zeros(rows.object_bytes(len(slots)), dtype=torch.uint8)
    rows.gather_slots(slots, obj)
    assert torch.equal(obj, reference.rows(cache, fmt, s.nl, s.bs, slots))
    other = clone(cache)
    RowTransfer(other, fmt, block_size=s.bs).scatter_slots(slots, obj)
    for token in range(s.nb * s.bs):
        got = reference.rows(other, fmt, s.nl, s.bs, [token])
        wanted = reference.rows(cache, fmt, s.nl, s.bs, [token])
        assert torch.equal(got, wanted if token in slots else torch.zeros_like(wanted))


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_packed_heads_moved_token_by_token_keep_their_place(heads: int) -> None:
    """LMCache passes the width of a head's K and V where its kernel doubles it: offsets beyond the block."""
    for fmt in (F.NL_X_NB_NH_BS_CS, F.NL_X_NB_BS_NH_CS):
        assert_moves(fmt, Sizes(4, 2, 3, heads, 8, torch.bfloat16, 0), [5, 0, 11, 7])


@pytest.mark.parametrize("fmt", [F.NL_X_NB_BS_HS, F.NB_NL_TWO_BS_NH_HS, F.NL_X_NB_BS_NH_HS], ids=lambda fmt: fmt.name)
def test_token_transfers_honour_gaps_between_blocks(fmt: EngineKVFormat) -> None:
    """LMCache's token kernel ignores the block stride, and takes one tensor of all layers for one of a layer."""
    assert_moves(fmt, Sizes(4, 3, 2, 2, 8, torch.float16, 1), [7, 2, 3])


def test_two_blocks_are_not_taken_for_keys_and_values() -> None:
    """LMCache reads [2 blocks, K and V, ..] as [K and V, 2 blocks, ..]."""
    with pytest.raises(AmbiguousLayoutError, match="'kv_axis' decides"):
        found(tensors(3, 2, 2, 3, 2, 4), NHD)
    assert found(tensors(3, 2, 2, 3, 2, 4), {**NHD, "kv_axis": 1})[0] == F.NL_X_NB_TWO_BS_NH_HS


def test_heads_and_tokens_are_not_guessed() -> None:
    """LMCache takes the layout of the device for granted when none is named."""
    for cache in (tensors(3, 7, 3, 2, 8), tensors(3, 2, 7, 3, 2, 8)):
        with pytest.raises(AmbiguousLayoutError, match="'kv_layout' decides"):
            found(cache, {})


def test_padded_packed_layers_of_a_hybrid_model() -> None:
    """LMCache refuses a padded [NB, BS, NH, CS], and reads a block size of 1 from the packed heads-first layout."""
    padded = [torch.zeros(14, 16, 2, 8)[::2] for _ in range(2)]
    fmt, cache = found(padded, NHD)
    assert (fmt, layout.get_block_size(cache, fmt)) == (F.NL_X_NB_BS_NH_CS, 16)
    fmt, cache = found([torch.zeros(14, 1, 16, 8)[::2] for _ in range(2)], HND)
    assert (fmt, layout.get_block_size(cache, fmt)) == (F.NL_X_NB_NH_BS_CS, 16)


def test_every_group_has_its_own_geometry() -> None:
    """LMCache's connector uses one format, block size, head size and stride for all groups."""
    layers: list[Any] = [torch.zeros(14, 4, 64)[::2], torch.zeros(7, 8, 32)]
    manager = KVLayerGroupsManager(layers, [F.NL_X_NB_BS_HS] * 2, lmcache_tokens_per_chunk=8)
    descs = [manager.get_shape_desc(index) for index in range(2)]
    assert [(d.bs, d.hs, d.block_step) for d in descs] == [(4, 64, 2 * 4 * 64), (8, 32, 8 * 32)]


def test_planes_keep_their_split_and_their_stride() -> None:
    """LMCache knows only the sum of the planes' widths and the first plane's stride."""
    layers: list[Any] = [
        [torch.zeros(14, 4, 1, 512)[::2], torch.zeros(7, 4, 1, 64)],
        [torch.zeros(7, 4, 1, 448), torch.zeros(7, 4, 1, 128)],
    ]
    manager = KVLayerGroupsManager(layers, [F.NL_X_NP_X_NB_BS_ONE_HS] * 2, lmcache_tokens_per_chunk=4)
    assert [group.layer_indices for group in manager.kernel_groups] == [[0], [1]]
    strides = [plane.block_stride for plane in manager.get_shape_desc(0).planes]
    assert strides == [2 * 4 * 512 * 4, 4 * 64 * 4]


def test_values_narrower_than_keys() -> None:
    """LMCache takes the geometry of a pair from K alone."""
    pair: list[Any] = [[noise((7, 4, 2, 24), torch.float16), noise((7, 4, 2, 16), torch.float16)]]
    fmt, cache = found([tuple(pair[0])], {})
    assert fmt == F.NL_X_TWO_X_NB_BS_NH_HS
    rows = RowTransfer(cache, fmt)
    assert rows.plan.bytes_per_token == 2 * (24 + 16) * 2
    obj = torch.zeros(rows.object_bytes(4), dtype=torch.uint8)
    rows.gather([3], 4, obj)
    assert torch.equal(obj, reference.rows(pair, fmt, 1, 4, [12, 13, 14, 15]))


def test_a_page_of_a_cpu_engine_has_no_tokens_to_be_taken_out() -> None:
    """LMCache moves the tokens that the declared shape shows; inside, K is packed another way."""
    fmt, cache = found(tensors(2, 7, 2, 32, 64), {"page_order": "opaque"})
    assert fmt == F.NL_X_NB_PAGE
    with pytest.raises(LayoutError, match="only whole blocks"):
        RowTransfer(cache, fmt)
    assert BlockTransfer(cache, fmt).plan.block_size == 32


def test_objects_of_different_bytes_have_different_names() -> None:
    """LMCache's objects do not say what is in them: K and V apart, packed, or an indexer's bytes."""
    formats = (F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_NB_BS_NH_CS, F.NL_X_NB_BSV_BSS, F.NL_X_NP_X_NB_BS_ONE_HS)
    names = {layout.object_tag(canonical(fmt), fmt, token_rows=rows) for fmt in formats for rows in (True, False)}
    assert len(names) == 2 * len(formats)


@pytest.mark.parametrize(
    "fmt",
    [
        F.NB_NL_TWO_BS_NH_HS,
        F.NB_NL_TWO_NH_BS_HS,
        F.TWO_X_NL_X_NBBS_NH_HS,
        F.NL_X_NBBS_ONE_HS,
        F.TWO_X_NL_X_NB_BS_NH_HS,
    ],
    ids=lambda fmt: fmt.name,
)
def test_groups_of_layers_that_are_not_a_tensor_each(fmt: EngineKVFormat) -> None:
    """LMCache's manager fails for one tensor of all layers, for lists of K and V, and for blocks without an axis."""
    manager = KVLayerGroupsManager(canonical(fmt), [fmt] * NL, lmcache_tokens_per_chunk=2 * BS, tokens_per_block=BS)
    assert manager.kernel_groups[0].layer_indices == list(range(NL))
    assert manager.get_shape_desc(0).nb == NB


def test_no_layers_have_no_windows() -> None:
    """LMCache's empty manager raises an AttributeError."""
    assert KVLayerGroupsManager([], []).get_attn_desc() == AttnWindowDesc(())


@pytest.mark.parametrize(
    "fmt",
    [
        F.NL_X_TWO_NB_NH_ONE_BS_HS,
        F.NL_X_TWO_X_NB_BS_NH_HS,
        F.NL_X_NP_X_NB_BS_ONE_HS,
        F.NL_X_NB_BS_NH_HS,
        F.NB_NL_TWO_NH_BS_HS,
        F.NL_X_NB_BSV_BSS,
    ],
    ids=lambda fmt: fmt.name,
)
def test_every_format_moves_and_heads_have_no_limit(fmt: EngineKVFormat) -> None:
    """LMCache has no kernel for these, or none for tokens, or copies an indexer's bytes as they stand; 32 heads at
    most."""
    assert_moves(fmt, Sizes(3, 1, 2, 40, 2, torch.float16, 0), [5, 0])


def test_a_model_of_latents_and_an_indexer() -> None:
    """LMCache's connector fails at start-up with sparse attention."""
    layers = [*tensors(2, 7, 4, 576), *tensors(2, 7, 4, 132, dtype=torch.uint8)]
    cache, formats = layout.normalize_and_discover_per_layer_formats(layers, [[0, 1], [2, 3]], VLLM)
    assert formats == [F.NL_X_NB_BS_HS] * 2 + [F.NL_X_NB_BSV_BSS] * 2
    manager = KVLayerGroupsManager(cache, formats, lmcache_tokens_per_chunk=4)
    assert [group.layer_indices for group in manager.kernel_groups] == [[0, 1], [2, 3]]


def test_every_shape_can_be_written() -> None:
    """LMCache writes Unknown for packed heads and indexers, and the block size twice for an indexer."""
    text = layout.get_concrete_engine_kv_shape_from_shape_desc
    packed = layout.make_page_buffer_shape_desc(tensors(1, 7, 2, 3, 8), F.NL_X_NB_NH_BS_CS, 0, 5, 7, 3)
    assert text(packed, F.NL_X_NB_NH_BS_CS) == "5 x [7, 2, 3, 8]"
    assert text(packed, F.NL_X_NB_BS_NH_CS) == "5 x [7, 3, 2, 8]"
    assert text(packed, F.NL_X_NB_BSV_BSS) == f"5 x [7, {3 * 128}, {3 * 4}]"
    shown = layout.get_concrete_engine_kv_shape(canonical(F.NL_X_NB_BSV_BSS), F.NL_X_NB_BSV_BSS)
    assert shown == f"5 x [7, {3 * 128}, {3 * 4}]"


@pytest.mark.parametrize("fmt", F, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("blocks", [0, 1])
def test_no_block_and_one_padded_block(fmt: EngineKVFormat, blocks: int) -> None:
    """LMCache crashes on one padded block, and turns the axes of a cache without blocks around."""
    cache = build(fmt, Sizes(blocks, 2, 3, 2, 16, torch.float16, 1))
    transfer = BlockTransfer(cache, fmt, block_size=3)
    obj = torch.zeros(transfer.object_bytes(blocks), dtype=torch.uint8)
    transfer.gather(list(range(blocks)), obj)
    with pytest.raises(IndexError, match=f"block id {blocks} "):
        transfer.gather([blocks], torch.zeros(transfer.object_bytes(1), dtype=torch.uint8))
    view = layout.attempt_permute_to_contiguous_view(torch.zeros(2 * blocks, 3, 8)[::2])
    assert isinstance(view, torch.Tensor)
    assert view.shape == (blocks, 3, 8)


def test_one_head_is_not_taken_for_latents() -> None:
    """LMCache takes any flat list of SGLang for latents where no hint says more."""
    with pytest.raises(AmbiguousLayoutError, match="'use_mla' decides"):
        found(tensors(4, 21, 1, 4), {}, SGLANG)
    with pytest.raises(LayoutError, match="kv_list_layout 'k_v'"):
        found(tensors(4, 21, 2, 4), {}, SGLANG)


def test_layout_names_are_known_or_refused() -> None:
    """LMCache refuses two of vLLM's names, and reads others through a translation of its own."""
    for name, expected in (("LBHNC", F.NL_X_NB_NH_BS_CS), ("LBNHC", F.NL_X_NB_BS_NH_CS)):
        assert found(tensors(2, 7, 3, 2, 8), {"kv_layout": name})[0] == expected  # type: ignore[typeddict-item]
    for name in ("LHBNC", "BHLNC"):
        with pytest.raises(LayoutError, match=f"kv_layout '{name}' is none of"):
            found(tensors(2, 7, 3, 2, 8), {"kv_layout": name})  # type: ignore[typeddict-item]


def test_a_padded_pool_with_an_offset() -> None:
    """Once refused by LMCache: layers cut from one pool, each with an offset and gaps between its blocks."""
    pool = torch.zeros(7, 3, 4, 64)
    layers = [pool[:, index] for index in range(3)]
    fmt, cache = found(layers, {})
    assert fmt == F.NL_X_NB_BS_HS
    assert layout.get_group_data_ptrs(cache, fmt, [0, 1, 2]) == [layer.data_ptr() for layer in layers]
    assert layout.resolve_block_stride_and_log_layout(cache, fmt, 0, 0) == 3 * 4 * 64


@pytest.mark.parametrize("fmt", WITH_BLOCKS, ids=lambda fmt: fmt.name)
def test_block_strides_of_every_format_with_blocks(fmt: EngineKVFormat) -> None:
    """LMCache knows them for six formats and refuses gaps in the others."""
    s = Sizes(3, 2, 4, 2, 16, torch.float16, 1)
    cache = build(fmt, s)
    leaf = cache
    while not isinstance(leaf, torch.Tensor):
        leaf = leaf[0]
    plane = layout.get_spec(cache, fmt).planes(0)[0]
    stride = layout.resolve_block_stride_and_log_layout(cache, fmt, 0, 0)
    assert stride is not None
    assert plane.block_stride == stride * leaf.element_size()
    assert stride >= 2 * plane.block_bytes // leaf.element_size()  # every second block is left out


def test_offsets_beyond_32_bits() -> None:
    """LMCache's kernels count in 32 bits."""
    width, blocks = 1 << 20, 2100
    pages = torch.empty(blocks, 1, width, dtype=torch.uint8)  # mapped, hardly any of it used
    pages[blocks - 1, 0, :] = 3
    obj = torch.zeros(width, dtype=torch.uint8)
    RowTransfer([pages], F.NL_X_NB_BS_HS).gather_slots([blocks - 1], obj)
    assert int(obj.min()) == 3


def test_every_layer_is_looked_at_and_bare_tensors_and_dicts_are_read() -> None:
    """LMCache looks at the first layer alone, labels any bare tensor, and recurses without end into a dict."""
    with pytest.raises(LayoutError, match="layer 2"):
        found([*tensors(2, 7, 3, 4), torch.zeros(7, 4)], {})
    for shape in ((7, 3, 4), (2, 7, 3, 2, 4)):
        with pytest.raises(LayoutError, match="one tensor for all layers"):
            found(torch.zeros(shape), NHD)
    assert found({"a": torch.zeros(7, 3, 4)}, {})[0] == F.NL_X_NB_BS_HS


def test_an_indexer_on_either_side_of_its_head_axis() -> None:
    """LMCache looks for the head axis on the side that the named layout has, and misses it on the other."""
    for shape in ((7, 1, 64, 132), (7, 64, 1, 132)):
        for hints in (NHD, HND):
            assert found(tensors(2, *shape, dtype=torch.uint8), hints)[0] == F.NL_X_NB_BSV_BSS


def test_pieces_of_sixteen_are_a_format() -> None:
    """LMCache reads the 310P's [NB, NH*HS/16, BS, 16] as tokens, heads and a head size of 16."""
    fmt, cache = found([tuple(tensors(2, 7, 16, 128, 16))], {"kv_layout": "NZ"})
    assert (fmt, layout.get_block_size(cache, fmt)) == (F.NL_X_TWO_X_NB_NZ_BS_C0, 128)
    assert layout.get_hidden_dim_size(cache, fmt) == 256
