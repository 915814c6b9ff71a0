# SPDX-License-Identifier: Apache-2.0
"""The C++ enum is the authority: each format has a spec that agrees with it and answers as LMCache's users expect."""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv.native import _core, layout
from semkv.native.kv_format.registry import all_detectors, all_specs
from semkv.native.kv_format.spec import KVFormatSpec, parse_name
from semkv.native.layout import EngineKVFormat, EngineType, LayoutError, get_spec, get_spec_class
from tests.native.kv_format.shapes import BS, NB, canonical, tensors

F = EngineKVFormat
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))["formats"]
OURS = (F.NL_X_TWO_X_NB_NZ_BS_C0, F.NL_X_NB_PAGE, F.NL_X_TWO_NB_PAGE)
ACCESSORS = {
    "num_layers": layout.get_num_layers,
    "num_blocks": layout.get_num_blocks,
    "block_size": layout.get_block_size,
    "page_buffer_size": layout.get_page_buffer_size,
    "num_heads": layout.get_num_heads,
    "head_size": layout.get_head_size,
    "hidden_dim": layout.get_hidden_dim_size,
    "tokens_per_layer": layout.get_tokens_per_layer,
    "elements_per_layer": layout.get_elements_per_layer,
    "concrete_shape_str": layout.get_concrete_engine_kv_shape,
}
PREDICATES = (
    "is_mla",
    "is_hnd",
    "is_two_major",
    "is_pbs_fused",
    "is_fused_packed",
    "is_kv_second_tuple",
    "is_single_kv",
)


def test_every_format_of_the_core_has_a_spec_and_no_other() -> None:
    assert set(all_specs()) == set(_core.all_formats()) == set(EngineKVFormat)
    assert [int(fmt) for fmt in EngineKVFormat] == list(range(len(EngineKVFormat)))
    assert {get_spec_class(value).format for value in range(len(EngineKVFormat))} == set(EngineKVFormat)
    assert set(all_detectors()) == set(EngineType) - {EngineType.MOCK}


def test_a_file_for_each_format_and_for_each_engine() -> None:
    for fmt, spec in all_specs().items():
        assert spec.__module__ == f"semkv.native.kv_format.specs.{fmt.name.lower()}"
    for engine, detector in all_detectors().items():
        assert type(detector).__module__ == f"semkv.native.kv_format.detectors.{engine.value}"


NAMES = """
AttnWindowDesc EngineGroupInfo EngineKVFormat EngineType KVLayerGroupsManager KernelGroupIdentity KernelGroupInfo
LayoutHints ObjectGroupInfo PageBufferShapeDesc assert_contiguous attempt_permute_to_contiguous_view detect_format
extract_kv_cache_shapes format_kvcache_shape_spec get_attention_backend get_block_size get_concrete_engine_kv_shape
get_concrete_engine_kv_shape_from_shape_desc get_device get_dtype get_elements_per_layer
get_engine_kv_shape_description get_group_data_ptrs get_head_size get_hidden_dim_size get_kv_size get_num_blocks
get_num_heads get_num_layers get_page_buffer_size get_shape_and_dtype get_spec get_spec_class get_tokens_per_layer
group_layers_by_identity make_page_buffer_shape_desc measure_list_depth_until_tensor
normalize_and_discover_per_layer_formats normalize_kv_and_discover_format parse_kvcache_shape_spec
resolve_block_stride_and_log_layout
"""


def test_the_front_has_the_names_that_lmcache_users_know() -> None:
    assert set(NAMES.split()) - set(layout.__all__) == set()
    assert all(hasattr(layout, name) for name in layout.__all__)


def test_the_stub_names_what_the_core_has() -> None:
    path = Path(inspect.getfile(layout)).with_name("_core.pyi")
    text = path.read_text(encoding="utf-8")
    public = {name for name in vars(_core) if not name.startswith("_")}
    assert {name for name in public if f"def {name}(" not in text and f"class {name}" not in text} == set()
    assert issubclass(EngineKVFormat, enum.IntEnum)
    assert all(f"    {fmt.name} = {fmt.value}\n" in text for fmt in EngineKVFormat)


@pytest.mark.parametrize("fmt", EngineKVFormat, ids=lambda fmt: fmt.name)
def test_predicates_follow_from_the_name(fmt: EngineKVFormat) -> None:
    """Two independent readings of a layout, the core's table and the grammar of names, agree."""
    levels, axes = parse_name(fmt.name)
    structures = [_core.is_cross_layer(fmt), _core.is_kv_list(fmt), _core.is_layer_list(fmt)]
    assert structures.count(True) == 1
    assert _core.is_cross_layer(fmt) == (levels == ())
    assert _core.is_kv_list(fmt) == (levels[:1] == ("TWO",))
    assert _core.is_kv_second_tuple(fmt) == (levels[1:2] in (("TWO",), ("NP",)))
    assert _core.is_two_major(fmt) == (axes[0] == "TWO")
    assert _core.is_pbs_fused(fmt) == ("NBBS" in axes)
    assert _core.is_opaque(fmt) == ("PAGE" in axes)
    assert _core.is_nz(fmt) == ("NZ" in axes)
    assert _core.is_hnd(fmt) == ("NH" in axes and "BS" in axes and axes.index("NH") < axes.index("BS"))
    of_token = axes[axes.index("BS") :] if "BS" in axes else ()
    packed = "CS" in axes or "TWO" in of_token or fmt == F.NL_X_NB_PAGE
    assert _core.is_fused_packed(fmt) == packed
    two = "TWO" in levels or ("TWO" in axes and not packed)
    assert _core.kv_size(fmt) == (2 if two else 1)
    assert get_spec_class(fmt).producers


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_golden_classification(golden: dict[str, Any]) -> None:
    fmt = EngineKVFormat(golden["value"])
    assert fmt.name == golden["name"]
    assert _core.is_deprecated(fmt) == golden["deprecated"]
    assert getattr(_core, golden["structure"])(fmt)
    assert _core.kv_size(fmt) == golden["kv_size"]
    assert {name for name in PREDICATES if getattr(_core, name)(fmt)} == set(golden["modifiers"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_golden_answers(golden: dict[str, Any]) -> None:
    fmt = EngineKVFormat(golden["value"])
    cache = canonical(fmt)
    for name, expected in golden["golden"].items():
        if name == "n_ptrs":
            continue
        if str(expected).startswith("ValueError"):
            with pytest.raises(LayoutError, match=name):
                ACCESSORS[name](cache, fmt)
            continue
        answer = ACCESSORS[name](cache, fmt)
        if fmt == F.NL_X_NB_BSV_BSS and name == "concrete_shape_str":
            assert answer == f"5 x [{NB}, {BS * 128}, {BS * 4}]"  # LMCache shows the block size twice instead
        else:
            assert answer == expected, name
    layers = list(range(5))
    assert len(layout.get_group_data_ptrs(cache, fmt, layers)) == golden["golden"]["n_ptrs"]
    assert get_spec(cache, fmt).dtype() == (torch.uint8 if fmt == F.NL_X_NB_BSV_BSS else torch.float16)
    get_spec(cache, fmt).check()


@pytest.mark.parametrize("fmt", OURS, ids=lambda fmt: fmt.name)
def test_formats_that_others_do_not_number(fmt: EngineKVFormat) -> None:
    cache = canonical(fmt)
    assert (layout.get_num_layers(cache, fmt), layout.get_num_blocks(cache, fmt)) == (5, 7)
    assert layout.get_block_size(cache, fmt) == 3
    width = {F.NL_X_TWO_X_NB_NZ_BS_C0: 64, F.NL_X_NB_PAGE: 16, F.NL_X_TWO_NB_PAGE: 8}[fmt]
    assert layout.get_hidden_dim_size(cache, fmt) == width


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (5, (6, 1, 7)),
        (3, (2, 3, 7)),
        (12, (2, 5, 3, 7)),
        (13, (2, 3, 5, 7)),
        (6, (2, 2, 5, 3, 7)),
        (1, (2, 2, 3, 5, 7)),
        (7, (2, 2, 5, 3, 7)),
        (2, (2, 2, 3, 5, 7)),
        (10, (2, 5, 3, 7)),
        (11, (2, 3, 5, 7)),
        (15, (2, 2, 5, 3, 7)),
    ],
)
def test_paged_layer_shape(value: int, shape: tuple[int, ...]) -> None:
    assert get_spec_class(EngineKVFormat(value)).paged_layer_shape(2, 3, 5, 7) == shape


@pytest.mark.parametrize("value", [0, 9, 16])
def test_paged_layer_shape_is_refused_where_a_layer_is_not_one_tensor(value: int) -> None:
    with pytest.raises(LayoutError, match="not one tensor"):
        get_spec_class(EngineKVFormat(value)).paged_layer_shape(2, 3, 5, 7)


def test_pointers_in_the_order_that_tables_have() -> None:
    layers = [torch.zeros(2, 4, 2, 1, 8) for _ in range(4)]
    expected = [layers[i].data_ptr() for i in (0, 2, 3)]
    assert layout.get_group_data_ptrs(list(layers), F.NL_X_TWO_NB_BS_NH_HS, [0, 2, 3]) == expected
    keys, values = layers[:2], layers[2:]
    halves = [tensor.data_ptr() for tensor in layers]
    assert layout.get_group_data_ptrs([list(keys), list(values)], F.TWO_X_NL_X_NBBS_NH_HS, [0, 1]) == halves
    pairs = [[keys[0], values[0]], [keys[1], values[1]]]
    interleaved = [keys[0].data_ptr(), values[0].data_ptr()]
    assert layout.get_group_data_ptrs(pairs, F.NL_X_TWO_X_NB_BS_NH_HS, [0]) == interleaved
    pool = torch.zeros(2, 80, 2, 1, 1, 1)
    assert layout.get_group_data_ptrs(pool, F.NB_NL_TWO_BS_NH_HS, [0, 2]) == [pool.data_ptr()]


def test_descriptors() -> None:
    two = [torch.zeros(2, 32, 16, 8, 64, dtype=torch.bfloat16)]
    desc = layout.make_page_buffer_shape_desc(two, F.NL_X_TWO_NB_BS_NH_HS, 0, 4, 32, 16)
    assert (desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh, desc.hs, desc.element_size) == (2, 4, 32, 16, 8, 64, 2)
    assert (desc.scalars_per_token, desc.block_step) == (512, 8192)
    latent = layout.make_page_buffer_shape_desc([torch.zeros(32, 16, 512)], F.NL_X_NB_BS_HS, 0, 1, 32, 16)
    assert (latent.kv_size, latent.nh, latent.hs) == (1, 1, 512)
    fused = layout.make_page_buffer_shape_desc([torch.zeros(512, 1, 128)], F.NL_X_NBBS_ONE_HS, 0, 2, 32, 16)
    assert (fused.nh, fused.hs) == (1, 128)
    text = layout.get_concrete_engine_kv_shape_from_shape_desc
    assert text(fused, F.NL_X_NBBS_ONE_HS) == "2 x [512, 1, 128]"
    # Every format has a text, and each plane its own address and stride.
    for fmt in EngineKVFormat:
        assert "Unknown" not in text(desc, fmt)
    planes = [[torch.zeros(4, 2, 1, 512)[::2], torch.zeros(2, 2, 1, 64)]]
    split = layout.make_page_buffer_shape_desc(planes, F.NL_X_NP_X_NB_BS_ONE_HS, 0, 1, 2, 2, 2048)
    assert [plane.base for plane in split.planes] == [plane.data_ptr() for plane in planes[0]]
    assert [plane.block_stride for plane in split.planes] == [2 * 2 * 512 * 4, 2 * 64 * 4]


def test_a_deprecated_format_warns_once() -> None:
    cache = canonical(F.NL_X_NB_NH_BS_TWO_HS)
    get_spec_class(F.NL_X_NB_NH_BS_TWO_HS)._warned.clear()
    with pytest.warns(DeprecationWarning, match="NL_X_NB_NH_BS_TWO_HS"):
        get_spec(cache, F.NL_X_NB_NH_BS_TWO_HS)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_spec(cache, F.NL_X_NB_NH_BS_TWO_HS)


def test_objects_of_different_layout_have_different_names() -> None:
    tag = layout.object_tag
    nhd, hnd = canonical(F.NL_X_TWO_NB_BS_NH_HS), canonical(F.NL_X_TWO_NB_NH_BS_HS)
    packed = canonical(F.NL_X_NB_BS_NH_CS)
    # Rows of tokens are the same whichever way the pages are ordered, but not when K and V of a head are joined.
    assert tag(nhd, F.NL_X_TWO_NB_BS_NH_HS, token_rows=True) == tag(hnd, F.NL_X_TWO_NB_NH_BS_HS, token_rows=True)
    assert tag(nhd, F.NL_X_TWO_NB_BS_NH_HS, token_rows=True) != tag(packed, F.NL_X_NB_BS_NH_CS, token_rows=True)
    assert tag(nhd, F.NL_X_TWO_NB_BS_NH_HS, token_rows=False) != tag(hnd, F.NL_X_TWO_NB_NH_BS_HS, token_rows=False)
    with pytest.raises(LayoutError, match="no token rows"):
        tag(canonical(F.NL_X_NB_PAGE), F.NL_X_NB_PAGE, token_rows=True)
    splits = [[[torch.zeros(2, 2, 1, a), torch.zeros(2, 2, 1, b)]] for a, b in ((512, 64), (448, 128))]
    names = {tag(split, F.NL_X_NP_X_NB_BS_ONE_HS, token_rows=True) for split in splits}
    assert len(names) == 2


def test_names_of_objects_differ_where_their_bytes_do() -> None:
    def names(fmt: EngineKVFormat, layers: list[torch.Tensor]) -> list[str]:
        cache: Any = layers
        return [layout.object_tag(cache, fmt, token_rows=rows) for rows in (True, False)]

    two, latent = F.NL_X_TWO_NB_BS_NH_HS, F.NL_X_NB_BS_HS
    half, brain = torch.float16, torch.bfloat16
    rows, blocks = names(two, tensors(2, 2, 7, 4, 2, 8, dtype=half))
    for fmt, other in (
        (two, tensors(2, 2, 7, 4, 2, 8, dtype=brain)),
        (two, tensors(3, 2, 7, 4, 2, 8, dtype=half)),
        (two, tensors(2, 2, 7, 4, 3, 8, dtype=half)),
        (latent, tensors(2, 7, 4, 16, dtype=half)),  # a row of the same width, and no second one
    ):
        assert rows != names(fmt, other)[0]
        assert blocks != names(fmt, other)[1]
    # Rows do not know the blocks that they came from; blocks do. Neither knows how many there are.
    assert names(two, tensors(2, 2, 7, 8, 2, 8, dtype=half))[0] == rows
    assert names(two, tensors(2, 2, 7, 8, 2, 8, dtype=half))[1] != blocks
    assert names(two, tensors(2, 2, 9, 4, 2, 8, dtype=half)) == [rows, blocks]
    # K and V apart in an object, or two planes in one row: the same widths.
    pair: Any = [[torch.zeros(7, 4, 2, 8), torch.zeros(7, 4, 2, 8)]]
    planes: Any = [[torch.zeros(7, 4, 1, 16), torch.zeros(7, 4, 1, 16)]]
    assert names(F.NL_X_TWO_X_NB_BS_NH_HS, pair)[0] != names(F.NL_X_NP_X_NB_BS_ONE_HS, planes)[0]
    # Layers of several widths, as many of each or not, in another order.
    narrow, wide = torch.zeros(7, 4, 8), torch.zeros(7, 4, 16)
    mixed = [[narrow, narrow, wide], [narrow, wide, wide], [narrow, wide, narrow], [wide, narrow, narrow]]
    assert len({name for layers in mixed for name in names(latent, layers)}) == 2 * len(mixed)


class Stood(KVFormatSpec):
    """A format that there is not: another's number, and axes of its own."""

    format = EngineKVFormat.NL_X_NB_BS_NH_HS
    named: tuple[str, ...] = ()

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        return cls.named


def test_keys_and_values_inside_a_block() -> None:
    """Inside a token they are one row; where they halve a block's heads, and where two rows are said, the way out."""
    inside = type("Inside", (Stood,), {"named": ("NB", "BS", "TWO", "NH", "HS")})([torch.zeros(7, 3, 2, 5, 4)])
    inside.check()
    (plane,) = inside.planes()
    assert (plane.heads, plane.head_bytes, plane.block_bytes) == (10, 16, 3 * 2 * 5 * 16)
    assert inside.hidden_dim() == 2 * 5 * 4
    padded = type(inside)([torch.zeros(7, 3, 4, 5, 4)[:, :, :2]])
    with pytest.raises(LayoutError, match="a gap inside a block at axis 1"):
        padded.check()
    halves = type("Halves", (Stood,), {"named": ("NB", "NH", "TWO", "BS", "HS")})([torch.zeros(7, 5, 2, 3, 4)])
    for ask in (halves.check, halves.planes):
        with pytest.raises(LayoutError, match=r"halve a block's NH before its tokens.* override planes"):
            ask()
    said = {"named": ("NB", "BS", "TWO", "NH", "HS"), "format": EngineKVFormat.NL_X_NB_TWO_BS_NH_HS}
    with pytest.raises(LayoutError, match=r"set its kv_size in native/core/kv_format\.h to 1"):
        type("Said", (Stood,), said)([torch.zeros(7, 3, 2, 5, 4)]).check()


@pytest.mark.parametrize(
    ("fmt", "wrong", "message"),
    [
        (F.NL_X_TWO_NB_BS_NH_HS, torch.zeros(3, 7, 3, 2, 4), "axis 0 must be 2"),
        (F.NL_X_NBBS_ONE_HS, torch.zeros(21, 2, 4), "axis 1 must be 1"),
        (F.NL_X_NB_BS_HS, torch.zeros(7, 3, 2, 4), "has 4 axes, the format 3"),
    ],
)
def test_what_a_detector_of_ones_own_would_get_wrong(fmt: EngineKVFormat, wrong: torch.Tensor, message: str) -> None:
    """A format's own check stands behind every detector, for every layer."""
    with pytest.raises(LayoutError, match=message):
        get_spec([canonical(fmt)[0], wrong], fmt).check()
