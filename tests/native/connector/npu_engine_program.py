# SPDX-License-Identifier: Apache-2.0
"""What test_npu_engine.py runs under torch_npu: a real LMCache engine on the emulated device, through `install()`.

Real: torch_npu, LMCache's service factory, engine and storage, our connector. Stand-ins, named so: vLLM's platform
(vLLM-Ascend cannot be installed here), its configuration, and its group of ranks. `sys.argv[1]` is a folder.
Prints PASSED at the end.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch_npu  # noqa: F401 - the real package, on the emulated runtime

DEVICE = torch.device("npu:0")
LAYERS, BLOCKS, BLOCK, HEADS, WIDTH = 3, 16, 16, 2, 32
CHUNK = 64


class AscendStandInPlatform:
    """Stands in for vLLM-Ascend's platform."""

    device_type = device_name = "npu"

    @staticmethod
    def is_cpu() -> bool:
        return False

    @staticmethod
    def is_cuda_alike() -> bool:
        return False


def configuration(**changes: Any) -> Any:
    """Stands in for vLLM's configuration of a dense model, or an MLA one."""
    mla = changes.get("mla", False)
    model = SimpleNamespace(
        model="stand-in",
        dtype=torch.float16,
        use_mla=mla,
        served_model_name="stand-in",
        get_num_layers=lambda _parallel: LAYERS,
        get_num_kv_heads=lambda _parallel: 1 if mla else HEADS,
        get_head_size=lambda: 96 if mla else WIDTH,
        hf_config=SimpleNamespace(model_type="stand-in"),
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=changes.get("block_size", BLOCK), cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_connector_extra_config={}, kv_role="kv_both"),
        speculative_config=None,
    )


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, shape, dtype=torch.int16).view(torch.float16)


def dense() -> dict[str, Any]:
    return {f"layer.{n}": tuple(noise(BLOCKS, BLOCK, HEADS, WIDTH) for _ in range(2)) for n in range(LAYERS)}


def latent() -> dict[str, Any]:
    return {f"layer.{n}": (noise(BLOCKS, BLOCK, 1, 64), noise(BLOCKS, BLOCK, 1, 32)) for n in range(LAYERS)}


def on_device(pages: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(plane.to(DEVICE) for plane in planes) for name, planes in pages.items()}


def engine_of(folder: Path, vllm_config: Any, pages: dict[str, Any], **settings: Any) -> Any:
    """LMCache's engine as its own service factory makes it in a worker, ready to store."""
    from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.distributed import parallel_state

    parallel_state.get_tp_group = lambda: SimpleNamespace(  # type: ignore[assignment, return-value]  # a stand-in
        broadcast=lambda tensor, _src: tensor, broadcast_object=lambda obj, _src: obj
    )
    path = folder / "lmcache.yaml"
    known = {"chunk_size": CHUNK, "local_cpu": True, "max_local_cpu_size": 0.05, "save_unfull_chunk": True}
    known |= {"local_disk": f"file://{folder}/disk/", "max_local_disk_size": 0.1}
    path.write_text(json.dumps(known | settings), encoding="utf-8")
    config = LMCacheEngineConfig.from_file(str(path))
    impl: Any = SimpleNamespace(_role=SimpleNamespace(name="WORKER"), kv_caches={})
    LMCacheConnectorV1Impl._apply_extra_config(impl, config, vllm_config)
    factory = VllmServiceFactory(config, vllm_config, "worker")
    impl.lmcache_engine = factory.get_or_create_lmcache_engine()
    impl._manager = SimpleNamespace(post_init=impl.lmcache_engine.post_init)
    LMCacheConnectorV1Impl.register_kv_caches(impl, pages)
    return impl.lmcache_engine


def slots_of(*blocks: int) -> torch.Tensor:
    """On the device, as LMCache's adapter sends them."""
    return torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in blocks]).to(DEVICE)


def block_bytes(pages: dict[str, Any], block: int) -> bytes:
    planes = [plane.cpu()[block] for layer in pages.values() for plane in layer]
    return b"".join(plane.contiguous().view(torch.uint8).numpy().tobytes() for plane in planes)


def there_and_back(folder: Path, host: dict[str, Any], vllm_config: Any, **settings: Any) -> tuple[dict[str, Any], Any]:
    """What a store took from some blocks, a retrieve puts into others, of the blocks that vLLM does not hold."""
    from semkv.native.lmcache_connector import layout_tag

    pages = on_device(host)
    engine = engine_of(folder, vllm_config, pages, **settings)
    tokens = list(range(150))
    stored, loaded = (7, 2, 3, 0, 5, 1, 9, 4, 11, 6), (8, 10, 12, 13, 14, 15, 7, 2, 3, 0)
    expected = [block_bytes(pages, block) for block in stored]
    before = [block_bytes(pages, block) for block in loaded]
    engine.store(tokens, kvcaches=list(pages.values()), slot_mapping=slots_of(*stored)[:150])
    assert engine.lookup(tokens) == 150
    mask = torch.ones(150, dtype=torch.bool)
    got = engine.retrieve(
        tokens, mask, kvcaches=list(pages.values()), slot_mapping=slots_of(*loaded)[:150], vllm_cached_tokens=20
    )
    assert int(got.sum()) == 150
    after = [block_bytes(pages, block) for block in loaded]
    assert after[0] == before[0]  # vLLM holds it
    assert after[1:] == expected[1:]
    key = next(iter(engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache))
    assert f"+{layout_tag(vllm_config)}" in key.to_string(), key.to_string()
    return pages, engine


def run(folder: Path) -> None:
    """In one process, for it takes long to start: refused, a dense model, the device stage, an MLA model."""
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    refused(folder)
    LMCacheEngineBuilder.destroy(ENGINE_NAME)
    pages, engine = there_and_back(folder, dense(), configuration())
    device_stage(pages, engine)
    LMCacheEngineBuilder.destroy(ENGINE_NAME)
    settings = {"extra_config": {"save_only_first_rank": False}}
    there_and_back(folder, latent(), configuration(mla=True), **settings)


def device_stage(pages: dict[str, Any], engine: Any) -> None:
    """prefetch(tier=device): copies are made, handed over, counted, found and evicted."""
    from semkv.bus.status import ChunkStatus, State, Tier
    from semkv.consumers.storage import LMCacheStorage
    from tests.consumers.storage.nobody import Nobody

    tokens = list(range(1000, 1000 + 2 * CHUNK))
    stored, loaded = (7, 2, 3, 0, 5, 1, 9, 4), (8, 10, 12, 13, 14, 15, 6, 11)
    expected = [block_bytes(pages, block) for block in stored]
    kwargs: dict[str, Any] = {"kvcaches": list(pages.values())}
    engine.store(tokens, slot_mapping=slots_of(*stored), **kwargs)
    hashes = tuple(found for _, _, found in engine.token_database.process_tokens(tokens, make_key=False))
    storage = LMCacheStorage(engine, Nobody())
    size = engine.gpu_connector.get_shape(CHUNK).numel()

    result = storage.prefetch(hashes, tier=Tier.DEVICE)
    assert result.state is State.SUCCEEDED, result
    assert result.chunk_status == (ChunkStatus.LOADED,) * 2
    assert result.bytes_by_tier == {"device": 2 * size}
    (step,) = result.steps
    assert (step.name, step.attributes["kv.bytes"]) == ("kv.tier.load cpu→device", 2 * size)
    assert storage.locate(hashes).chunk_tiers[0][0] is Tier.DEVICE
    stage = engine.gpu_connector.device_stage
    assert [(t.used_bytes, t.chunks) for t in storage.tiers() if t.name == "device"] == [(2 * size, 2)]
    hot_cache = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
    copies = [copy for copy in stage.lend(list(hot_cache.values())) if copy is not None]
    assert [copy.raw_data.device for copy in copies] == [DEVICE] * 2
    stage.release(copies)

    # The bytes come from the device: host memory is spoiled meanwhile.
    for memory_obj in hot_cache.values():
        memory_obj.raw_data.zero_()
    before = stage.handed_over
    engine.retrieve(tokens, slot_mapping=slots_of(*loaded), **kwargs)
    assert stage.handed_over - before == 2
    assert [block_bytes(pages, block) for block in loaded] == expected

    gone = storage.evict(hashes[1:], tiers=(Tier.DEVICE,))
    assert gone.chunk_status == (ChunkStatus.REMOVED,)
    assert gone.bytes_by_tier == {"device": size}
    assert Tier.CPU in storage.locate(hashes).chunk_tiers[1]
    storage.evict(hashes[:1])
    assert stage.usage() == (0, 0)


def chosen(platforms: Any) -> None:
    """Nothing is touched on another device, nor where LMCache-Ascend is; what is installed then is ours."""
    from lmcache.v1 import gpu_connector

    from semkv.native.lmcache_connector import install, layout_tag

    before = gpu_connector.CreateGPUConnector
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    install()
    platforms.current_platform = AscendStandInPlatform()
    sys.modules["lmcache_ascend"] = ModuleType("lmcache_ascend")
    install()
    assert gpu_connector.CreateGPUConnector is before
    assert layout_tag(configuration()) == ""
    del sys.modules["lmcache_ascend"]
    install()
    assert gpu_connector.CreateGPUConnector is not before
    assert layout_tag(configuration()) == "nl_x_two_x_nb_bs_nh_hs.b16"


def refused(folder: Path) -> None:
    """A chunk size that is none of whole blocks; pages that are not as the configuration says."""
    from semkv.native.connector.startup import StartUpError
    from semkv.native.connector.vllm_cpu import EngineLayoutError

    for vllm_config, settings, error, message in (
        (configuration(), {"chunk_size": 40}, StartUpError, "set chunk_size to a multiple of 16"),
        (configuration(block_size=32), {}, EngineLayoutError, "16 tokens per block, its configuration says NL_X_TWO_X"),
        (configuration(mla=True), {}, StartUpError, "save_only_first_rank: false"),
    ):
        try:
            engine_of(folder, vllm_config, on_device(dense()), **settings)
        except error as found:
            assert message in str(found), found
        else:
            raise AssertionError(message)


def main() -> None:
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    import lmcache.integration.vllm.vllm_v1_adapter  # noqa: F401 - as vLLM's connector does
    import vllm.platforms

    torch.manual_seed(3)
    try:
        chosen(vllm.platforms)
        run(Path(sys.argv[1]))
        print("PASSED", flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # LMCache's threads would keep the process alive


main()
