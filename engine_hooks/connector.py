# SPDX-License-Identifier: Apache-2.0
"""SemKVConnectorV1: LMCache's connector with semkv's hooks, to be named in a configuration.

For where plugins are not loaded: `kv_connector_module_path: semkv.engine_hooks.connector`. It extends LMCache-Ascend's
connector where that is installed, else vLLM's for LMCache.

Threads: as vLLM calls a connector. Errors: the base's pass unchanged; ours never reach the engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from semkv.engine_hooks import attach
from semkv.engine_hooks.hooked import hooked_class

ASCEND_CONNECTOR = (
    "lmcache_ascend.integration.vllm.lmcache_ascend_connector_v1",
    "LMCacheAscendConnectorV1Dynamic",
)
VLLM_CONNECTOR = ("vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector", "LMCacheConnectorV1")


def _base_class() -> type:
    if importlib.util.find_spec("lmcache_ascend") is not None:
        module, name = ASCEND_CONNECTOR
        ascend: type = getattr(importlib.import_module(module), name)
        return ascend
    module, name = VLLM_CONNECTOR
    base: type = getattr(importlib.import_module(module), name)
    return base


class _Named(hooked_class(_base_class())):  # type: ignore[misc]  # the base is known at run time only
    """LMCache's connector with semkv's hooks, to be named in `--kv-transfer-config`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        reason = attach.refusal(vllm_config, type(self))
        if reason is None:
            attach.make_ready()
        super().__init__(vllm_config, role, kv_cache_config)
        if reason is None and attach.wanted():
            attach.attach(self, vllm_config, role)


SemKVConnectorV1: Any = _Named
_Named.__name__ = _Named.__qualname__ = "SemKVConnectorV1"
