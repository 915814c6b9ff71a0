# SPDX-License-Identifier: Apache-2.0
"""Groups of layers: for every format, layers of equal structure and no others together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semkv.native.layout import (
    AttnWindowDesc,
    EngineGroupInfo,
    EngineKVFormat,
    KVLayerGroupsManager,
    LayoutError,
    get_num_layers,
    resolve_block_stride_and_log_layout,
)
from tests.native.kv_format.shapes import BS, NB, NL, canonical, tensors

F = EngineKVFormat


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fmt", F, ids=lambda fmt: fmt.name)
def test_every_format_can_be_grouped(fmt: EngineKVFormat) -> None:
    cache = canonical(fmt)
    assert get_num_layers(cache, fmt) == NL
    manager = KVLayerGroupsManager(cache, [fmt] * NL, lmcache_tokens_per_chunk=2 * BS, tokens_per_block=BS)
    assert manager.num_kernel_groups == 1
    assert manager.kernel_groups[0].layer_indices == list(range(NL))
    desc = manager.get_shape_desc(0)
    assert (desc.nl, desc.nb, desc.bs) == (NL, NB, BS)
    assert manager.num_blocks == NB
    assert manager.calculate_num_blocks(0, 4) == 2
    assert manager.get_attn_desc() == AttnWindowDesc((-1,))
    stride = resolve_block_stride_and_log_layout(cache, fmt, 0, 0)
    assert (stride is None) == (fmt in (F.TWO_X_NL_X_NBBS_NH_HS, F.NL_X_NBBS_ONE_HS))


def test_a_fused_format_needs_its_block_size() -> None:
    with pytest.raises(LayoutError, match="give tokens_per_block"):
        KVLayerGroupsManager(canonical(F.NL_X_NBBS_ONE_HS), [F.NL_X_NBBS_ONE_HS] * NL)


def test_keys_and_values_in_lists_with_a_later_group() -> None:
    keys = [*tensors(2, NB, BS, 2, 4), *tensors(2, NB, BS, 2, 8)]
    values = [tensor.clone() for tensor in keys]
    manager = KVLayerGroupsManager([keys, values], [F.TWO_X_NL_X_NB_BS_NH_HS] * 4, lmcache_tokens_per_chunk=BS)
    assert [group.layer_indices for group in manager.kernel_groups] == [[0, 1], [2, 3]]
    assert manager.get_shape_desc(1).planes[1].base == values[2].data_ptr()


def test_what_separates_layers() -> None:
    layers: list[Any] = [
        torch.zeros(NB, BS, 64),
        torch.zeros(NB, BS, 64, dtype=torch.bfloat16),
        torch.zeros(NB, BS, 128),
        torch.zeros(NB, 2 * BS, 64),
        torch.zeros(NB, BS, 64),
    ]
    manager = KVLayerGroupsManager(layers, [F.NL_X_NB_BS_HS] * 5, lmcache_tokens_per_chunk=6 * BS)
    assert [group.layer_indices for group in manager.kernel_groups] == [[0, 4], [1], [2], [3]]
    # The same sum of widths, split otherwise.
    planes = [[torch.zeros(NB, BS, 1, a), torch.zeros(NB, BS, 1, b)] for a, b in ((512, 64), (448, 128), (512, 64))]
    manager = KVLayerGroupsManager(planes, [F.NL_X_NP_X_NB_BS_ONE_HS] * 3, lmcache_tokens_per_chunk=BS)
    assert [group.layer_indices for group in manager.kernel_groups] == [[0, 2], [1]]


def test_engine_groups_and_windows() -> None:
    layers = tensors(4, NB, 4, 8)
    infos = [
        EngineGroupInfo((0, 2), tokens_per_block=8, engine_group_idx=0),
        EngineGroupInfo((1,), engine_group_idx=1, sw_size_tokens=8),
    ]
    manager = KVLayerGroupsManager(layers, [F.NL_X_NB_BS_HS] * 4, infos, 16, separate_object_groups=True)  # type: ignore[arg-type]
    assert [group.layer_indices for group in manager.kernel_groups] == [[0, 2], [1]]  # layer 3 is in no group
    assert manager.get_slots_per_chunk(0) == 8
    assert manager.get_slots_per_chunk_in_sw(1) == 8
    assert [group.kernel_group_indices for group in manager.object_groups] == [[0], [1]]
    assert manager.get_attn_desc().windows == (-1, 1)
    manager.enable_full_sw_kv()
    assert manager.get_slots_per_chunk_in_sw(1) == 16


@pytest.mark.parametrize(
    ("info", "chunk", "message"),
    [
        (EngineGroupInfo((0, 1), tokens_per_block=6), 12, "tokens_per_block 6 is not a multiple of its 4 slots"),
        (EngineGroupInfo((0, 1)), 10, "a chunk of 10 tokens is not whole blocks of 4 tokens"),
        (EngineGroupInfo((0, 1), sw_size_tokens=6), 16, "a window of 6 tokens"),
        (EngineGroupInfo((0,)), 16, "are not the groups of equal structure"),
        (EngineGroupInfo((0, 7)), 16, "names layer 7"),
    ],
)
def test_what_does_not_fit_is_refused(info: EngineGroupInfo, chunk: int, message: str) -> None:
    layers = tensors(2, NB, 4, 8)
    infos = [info] if info.layer_indices != (0,) else [info, EngineGroupInfo((1,))]
    with pytest.raises(LayoutError, match=message):
        KVLayerGroupsManager(layers, [F.NL_X_NB_BS_HS] * 2, infos, chunk)  # type: ignore[arg-type]


def test_no_layers() -> None:
    manager = KVLayerGroupsManager([], [])
    assert manager.get_attn_desc() == AttnWindowDesc(())
    with pytest.raises(LayoutError, match="no kernel group 0"):
        manager.get_shape_desc(0)
