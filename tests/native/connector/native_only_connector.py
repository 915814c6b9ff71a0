# SPDX-License-Identifier: Apache-2.0
"""vLLM's own LMCache connector with nothing of ours but the CPU device connector: what the tests here start."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from semkv.native.lmcache_connector import install


class NativeOnlyConnector(LMCacheConnectorV1):
    """Named by kv_connector_module_path in each process of the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)
