# SPDX-License-Identifier: Apache-2.0
"""The device connector's parts on LMCache's own objects, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from semkv.native.connector.device import BlockConnector
from semkv.native.connector.metadata import adopt, fit
from semkv.native.connector.startup import StartUpError, check, claim_disk, separate_disk
from semkv.native.connector.vllm_cpu import LATENT, PACKED, SPLIT, CpuLayout, EngineLayoutError

pytestmark = pytest.mark.lmcache
PACKED_32 = CpuLayout(PACKED, 32, "vec", "auto")


def metadata(**changes: Any) -> Any:
    from lmcache.v1.metadata import LMCacheMetadata

    known = {"model_name": "m", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0}
    known |= {"kv_dtype": torch.float32, "kv_shape": (2, 2, 64, 2, 32), "chunk_size": 64}
    return LMCacheMetadata(**(known | changes))


def memory(size: int) -> Any:
    from lmcache.v1.memory_management import AdHocMemoryAllocator

    return AdHocMemoryAllocator("cpu").allocate(torch.Size([size]), torch.uint8)


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (*shape, 4), dtype=torch.uint8).view(torch.float32).squeeze(-1)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (PACKED_32, (6, 2, 32, 64)),
        (CpuLayout(SPLIT, 32, "vec", "auto"), (2, 6, 2, 32, 32)),
        (CpuLayout(LATENT, 32, "plain", "auto"), (6, 32, 72)),
        (CpuLayout(LATENT, 32, "plain", "auto"), (6, 32, 1, 72)),
    ],
    ids=["packed", "split", "latent", "latent-with-a-head"],
)
def test_there_and_back_without_what_the_engine_holds(layout: CpuLayout, shape: tuple[int, ...]) -> None:
    layers = [noise(*shape) for _ in range(3)]
    connector = BlockConnector(layout)
    per_block = connector.register(layers)
    assert per_block == sum(layer.numel() for layer in layers) * 4 // 6
    slots = torch.cat([torch.arange(block * 32, block * 32 + 32) for block in (4, 1, 0, 5)])[:120]
    objects = [memory(2 * per_block), memory(2 * per_block)]
    where: dict[str, Any] = {"kvcaches": layers, "slot_mapping": slots}
    connector.batched_from_gpu(objects, [0, 64], [64, 120], **where)

    empty = [torch.zeros_like(layer) for layer in layers]
    other = BlockConnector(layout)
    # 70 tokens are held: both blocks of the first chunk, none whole of the second.
    other.batched_to_gpu(objects, [0, 64], [64, 120], **(where | {"kvcaches": empty}), vllm_cached_tokens=70)
    axis = 1 if layout.format == SPLIT else 0
    for block, filled in ((4, False), (1, False), (0, True), (5, True), (2, False), (3, False)):
        for source, target in zip(layers, empty, strict=True):
            got, wanted = target.select(axis, block), source.select(axis, block)
            assert same(got, wanted) if filled else not got.view(torch.int32).any()
    assert connector.get_shape(33) == torch.Size([2 * per_block])


def test_a_freed_object_and_wrong_slots_are_refused() -> None:
    layers = [noise(6, 2, 32, 64)]
    connector = BlockConnector(PACKED_32)
    with pytest.raises(EngineLayoutError, match="no KV tensors"):
        connector.from_gpu(memory(8), 0, 32, slot_mapping=torch.arange(32))
    size = connector.register(layers)
    obj = memory(size)
    with pytest.raises(ValueError, match="slot 5 of token 0 does not begin a block"):
        connector.from_gpu(obj, 0, 32, slot_mapping=torch.arange(5, 37))
    with pytest.raises(IndexError, match="block id 6"):
        connector.from_gpu(obj, 0, 32, slot_mapping=torch.arange(192, 224))
    with pytest.raises(ValueError, match="2 blocks need"):
        connector.from_gpu(obj, 0, 64, slot_mapping=torch.arange(64))
    obj.invalidate()
    with pytest.raises(ValueError, match="already freed"):
        connector.to_gpu(obj, 0, 32, slot_mapping=torch.arange(32))


def test_tensors_that_are_not_as_configured_are_refused() -> None:
    for layers in ([noise(6, 2, 16, 64)], [noise(2, 6, 2, 32, 32)]):
        with pytest.raises(EngineLayoutError, match="its configuration says NL_X_NB_PAGE with 32"):
            BlockConnector(PACKED_32).register(layers)


def test_metadata_tells_layouts_apart_and_counts_whole_blocks() -> None:
    mine, other = metadata(), metadata()
    adopt(mine, PACKED_32)
    adopt(mine, PACKED_32)
    adopt(other, CpuLayout(PACKED, 64, "vec", "auto"))
    assert mine.model_name == "m+nl_x_nb_page.b32.vec"
    assert other.model_name == "m+nl_x_nb_page.b64.vec"
    assert CpuLayout(PACKED, 32, "vec", "fp8_e5m2").tag != CpuLayout(PACKED, 32, "vec", "fp8_e4m3").tag
    assert mine.get_shapes(13) == mine.get_shapes(32) == [torch.Size([2, 2, 32, 64])]
    assert mine.get_shapes() == [torch.Size([2, 2, 64, 64])]
    fit(mine, 2 * 2 * 32 * 64 * 4)
    assert mine.get_shapes(33) == [torch.Size([2, 2, 64, 64])]
    fit(mine, 3 * 32 * 64 * 4)  # layers of unequal width
    assert mine.get_shapes(33) == [torch.Size([1, 1, 64, 192])]
    with pytest.raises(EngineLayoutError, match="cannot share an object"):
        fit(mine, 1001)
    latent = metadata(kv_shape=(2, 1, 64, 1, 576), use_mla=True)
    adopt(latent, CpuLayout(LATENT, 32, "plain", "auto"))
    assert latent.model_name == "m+nl_x_nb_bs_hs.b32.plain"  # plain rows, but tails are as long as the blocks


def config(**values: Any) -> Any:
    defaults = {"chunk_size": 64, "enable_blending": False, "use_layerwise": False, "remote_serde": None}
    extra = values.pop("extra", {})
    ask = lambda name, default=None: extra.get(name, default)  # noqa: E731
    return SimpleNamespace(**(defaults | values), get_extra_config_value=ask)


def engine(block_size: int = 32, mla: bool = False) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size), model_config=SimpleNamespace(use_mla=mla)
    )


def test_start_up_refusals_name_the_way_out() -> None:
    check(config(), engine())
    check(config(extra={"save_only_first_rank": False}), engine(mla=True))
    cases = [
        (config(chunk_size=48), engine(), "set chunk_size to a multiple of 32"),
        (config(enable_blending=True), engine(), "set enable_blending: false"),
        (config(use_layerwise=True), engine(), "set use_layerwise: false"),
        (config(remote_serde="cachegen"), engine(), "set remote_serde: naive"),
        (config(), engine(mla=True), "save_only_first_rank: false"),
    ]
    for settings, vllm, message in cases:
        with pytest.raises(StartUpError, match=message):
            check(settings, vllm)


def test_two_engines_do_not_share_a_disk(tmp_path: Path) -> None:
    claim_disk(None)
    claim_disk(str(tmp_path / "disk"))
    claim_disk(str(tmp_path / "disk"))  # the same engine, again
    program = f"from semkv.native.connector.startup import claim_disk; claim_disk({str(tmp_path / 'disk')!r})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "is in use by another engine" in other.stderr
    assert list((tmp_path / "disk").iterdir()) == []


def test_data_parallel_engines_have_folders_of_their_own() -> None:
    def parallel(size: int, rank: int) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=size, data_parallel_rank=rank))

    for size, rank, expected in ((1, 0, "/d/"), (2, 0, "/d/dp0/"), (2, 1, "/d/dp1/")):
        settings = config(local_disk="/d/")
        separate_disk(settings, parallel(size, rank))
        separate_disk(settings, parallel(size, rank))
        assert settings.local_disk == expected
    nothing = config(local_disk=None)
    separate_disk(nothing, parallel(2, 1))
    assert nothing.local_disk is None
