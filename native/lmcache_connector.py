# SPDX-License-Identifier: Apache-2.0
"""Makes LMCache 0.4.3 store and retrieve for a vLLM that runs where LMCache has no device connector: on the CPU, and on
an NPU without LMCache-Ascend.

`install()` is called in every engine process before LMCache's connector is built, any number of times. It replaces six
functions in memory, never on disk, and does nothing on any other platform. `layout_tag()` names the layout for hash
domains and, being part of the keys' model name in both roles, keeps objects of different layouts apart.
Errors: EngineLayoutError and StartUpError (configuration), CoreMissingError (no C++ core), AcceleratorMissingError (no
NPU although vLLM runs on one), each one line.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from semkv.native.connector.metadata import PageLayout, adopt, fit
from semkv.native.connector.startup import StartUpError, check, claim_disk, separate_disk
from semkv.native.connector.vllm_cpu import CpuLayout, EngineLayoutError, cpu_layout
from semkv.native.connector.vllm_npu import NpuLayout, npu_layout, ours_serves
from semkv.native.extension import CoreMissingError, core
from semkv.native.transfer.streams import AcceleratorMissingError

__all__ = [
    "AcceleratorMissingError",
    "CoreMissingError",
    "EngineLayoutError",
    "StartUpError",
    "install",
    "layout_tag",
]

_MARK = "_semkv_native"


def layout_tag(vllm_config: Any) -> str:
    """The name of the engine's KV layout; empty where another's device connector serves."""
    return _layout(vllm_config).tag if _device() else ""


def install() -> None:
    """Patches LMCache in this process. Does nothing where another's device connector serves."""
    if not _device():
        return
    core()  # without it nothing below can work: say so here, before LMCache swallows it
    from lmcache.integration.vllm import utils, vllm_service_factory, vllm_v1_adapter
    from lmcache.v1 import gpu_connector

    _replace(utils, "get_vllm_torch_dev", _torch_device)
    _replace(utils, "vllm_layout_hints", _layout_hints)
    _replace(gpu_connector, "CreateGPUConnector", _create_connector)
    _replace(vllm_service_factory.VllmServiceFactory, "get_or_create_metadata", _metadata)
    _replace(vllm_v1_adapter.LMCacheConnectorV1Impl, "_apply_extra_config", _apply_extra_config)
    _replace(vllm_v1_adapter.LMCacheConnectorV1Impl, "register_kv_caches", _register_kv_caches)


def _replace(owner: Any, name: str, make: Any) -> None:
    """Puts make(original) in place of owner.name, once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, original)
    setattr(owner, name, replacement)


def _device() -> str:
    """What this process's vLLM runs on, "cpu" or "npu"; empty if our connectors are not for it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    return "npu" if current_platform.device_type == "npu" and ours_serves() else ""


def _layout(vllm_config: Any) -> PageLayout:
    return cpu_layout(vllm_config) if _device() == "cpu" else npu_layout(vllm_config)


def _torch_device(_original: Any) -> Any:
    """LMCache asks the device module only for its number of devices, to tell one node from many, and to select one."""

    def get_vllm_torch_dev() -> tuple[Any, str]:
        if _device() == "npu":
            import torch

            return torch.npu, "npu"
        return SimpleNamespace(device_count=lambda: 1 << 16, set_device=lambda _index: None), "cpu"

    return get_vllm_torch_dev


def _layout_hints(_original: Any) -> Any:
    """Newer vLLM has no layout to ask for, and LMCache would log an error about it."""

    def vllm_layout_hints() -> dict[str, str]:
        return {}

    return vllm_layout_hints


def _create_connector(original: Any) -> Any:
    def create_gpu_connector(config: Any, metadata: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(engine, "name", "") != "VLLM":
            return original(config, metadata, engine, *args, **kwargs)
        return _connector(metadata.semkv_layout)

    return create_gpu_connector


def _connector(layout: CpuLayout | NpuLayout) -> Any:
    # Not before: what is below needs the C++ core, and layout_tag() is asked for on platforms that do without.
    from lmcache.v1.gpu_connector import GPUConnectorInterface

    from semkv.native.connector.accelerator import AcceleratorConnector
    from semkv.native.connector.device import BlockConnector
    from semkv.native.connector.stage import StagedConnector, staged

    for ours in (BlockConnector, AcceleratorConnector, StagedConnector):
        GPUConnectorInterface.register(ours)
    if isinstance(layout, NpuLayout):
        return staged(AcceleratorConnector(layout.block_size, layout.hints, expected=layout.format))
    return staged(BlockConnector(layout))


def _metadata(original: Any) -> Any:
    def get_or_create_metadata(self: Any) -> Any:
        metadata = original(self)
        if metadata is not None:
            adopt(metadata, _layout(self.vllm_config))
        return metadata

    return get_or_create_metadata


def _apply_extra_config(original: Any) -> Any:
    """The last moment before LMCache builds its parts, in both roles, with the configuration complete."""

    def apply_extra_config(self: Any, config: Any, vllm_config: Any) -> None:
        original(self, config, vllm_config)
        check(config, vllm_config)
        separate_disk(config, vllm_config)
        if getattr(self._role, "name", "") == "SCHEDULER":  # one of them for each engine, however many ranks
            claim_disk(config.local_disk)

    return apply_extra_config


def _register_kv_caches(_original: Any) -> Any:
    """LMCache would derive a hidden size from the raw CPU shape, and get it wrong."""

    def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
        self.kv_caches = kv_caches
        engine = self.lmcache_engine
        if engine is not None:
            per_block = engine.gpu_connector.register(list(kv_caches.values()))
            fit(engine.metadata, per_block)
        self._manager.post_init()

    return register_kv_caches
