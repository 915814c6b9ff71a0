# SPDX-License-Identifier: Apache-2.0
"""Groups of layers as text: what is written can be read, what LMCache's command line takes is read as it reads it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semkv.native.kv_format.shape_spec import DTYPES, MAX_LAYERS
from semkv.native.layout import (
    EngineKVFormat,
    KVLayerGroupsManager,
    LayoutError,
    format_kvcache_shape_spec,
    parse_kvcache_shape_spec,
)


def test_two_groups() -> None:
    groups = parse_kvcache_shape_spec(" (2, 1024,16,8,128):Float16:30 ; (1,1024,16,4,64):bfloat16:2;")
    assert [group.layer_indices for group in groups] == [list(range(30)), [30, 31]]
    first, second = (group.shape_desc for group in groups)
    assert (first.kv_size, first.nl, first.nb, first.bs, first.nh, first.hs) == (2, 30, 1024, 16, 8, 128)
    assert (first.dtype, first.element_size, second.dtype) == (torch.float16, 2, torch.bfloat16)
    assert (groups[1].slots_per_block, groups[1].hidden_dim_size, groups[1].calculate_slots(20)) == (16, 256, 20)
    assert format_kvcache_shape_spec(groups) == "(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2"


group_texts = st.builds(
    lambda kv, sizes, dtype, layers: f"({kv},{','.join(map(str, sizes))}):{dtype}:{layers}",
    st.integers(1, 2),
    st.lists(st.integers(1, 10**6), min_size=4, max_size=4),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 50),
)


@given(st.lists(group_texts, min_size=1, max_size=5).map(";".join))
def test_what_is_written_can_be_read(text: str) -> None:
    groups = parse_kvcache_shape_spec(text)
    assert format_kvcache_shape_spec(groups) == text
    assert parse_kvcache_shape_spec(format_kvcache_shape_spec(groups)) == groups


def test_the_groups_of_an_engine_can_be_written() -> None:
    layers = [torch.zeros(7, 4, 64), torch.zeros(7, 4, 128)]
    manager = KVLayerGroupsManager(layers, [EngineKVFormat.NL_X_NB_BS_HS] * 2, lmcache_tokens_per_chunk=4)
    text = format_kvcache_shape_spec(manager.kernel_groups)
    assert text == "(1,7,4,1,64):float32:1;(1,7,4,1,128):float32:1"
    assert [group.shape_desc for group in parse_kvcache_shape_spec(text)] == [
        # An engine's descriptor says the stride of its blocks; the text knows of none.
        type(desc)(**{**{f: getattr(desc, f) for f in desc.__dataclass_fields__}, "block_stride_elems": 0})
        for desc in (manager.get_shape_desc(0), manager.get_shape_desc(1))
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one group"),
        (" ; ", "at least one group"),
        ("2,1024,16,8,128:float16:1", r"is not \(kv_size,nb,bs,nh,hs\):dtype:layers"),
        ("(2,1024,16,8,128):float16", "is not"),
        ("(2,1024,16,8,128):float16:1:2", "is not"),
        ("(2,1024,16,8,128)x:float16:1", "is not"),
        ("(2,1024,16,8,128:float16:1", "is not"),
        ("(2,1024,16,8):float16:1", "has 4 sizes, not the five kv_size, nb, bs, nh, hs"),
        ("(2,1024,16,8,128):float64:1", "dtype 'float64' is none of float16"),
        ("(2,1024,x,8,128):float16:1", "bs 'x' is not a positive number"),
        ("(2,1024,16,-8,128):float16:1", "nh '-8' is not"),
        ("(3,1024,16,8,128):float16:1", "kv_size 3 is neither 1 nor 2"),
        ("(2,1024,16,8,128):float16:0", "layers '0' is not"),
        (f"(2,1024,16,8,128):float16:{MAX_LAYERS};(2,1024,16,8,128):float16:1", "4097 layers in all; at most 4096"),
        ("(2,1024,16,8,128):float16:" + "9" * 5000, "layers '9999"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_kvcache_shape_spec(text)


def test_what_has_no_text_is_refused() -> None:
    with pytest.raises(LayoutError, match="no groups"):
        format_kvcache_shape_spec([])
    manager = KVLayerGroupsManager(
        [torch.zeros(7, 4, 64, dtype=torch.float8_e4m3fn)], [EngineKVFormat.NL_X_NB_BS_HS], lmcache_tokens_per_chunk=4
    )
    with pytest.raises(LayoutError, match=r"group 0: torch.float8_e4m3fn has no name"):
        format_kvcache_shape_spec(manager.kernel_groups)
