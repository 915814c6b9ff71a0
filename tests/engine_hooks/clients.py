# SPDX-License-Identifier: Apache-2.0
"""LMCache's real lookup clients in this process, with their real sockets, and no engine behind them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client.factory import LookupClientFactory
from lmcache.v1.metadata import LMCacheMetadata


def lmcache_config(**settings: Any) -> LMCacheEngineConfig:
    """A configuration as an operator would write it; `extra_config` included."""
    values = {
        "chunk_size": 16,
        "local_cpu": True,
        "enable_async_loading": True,
        "save_unfull_chunk": False,
        "pre_caching_hash_algorithm": "builtin",
        "lookup_timeout_ms": 200,
        **settings,
    }
    extra = {"lookup_backoff_time": 0.0, **values.pop("extra_config", {})}
    config = LMCacheEngineConfig.from_defaults(**values)
    config.extra_config = extra
    return config


def metadata(config: LMCacheEngineConfig, world_size: int = 1) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="model",
        world_size=world_size,
        local_world_size=world_size,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(2, 2, config.chunk_size, 2, 16),
        use_mla=False,
        role="scheduler",
        served_model_name="model",
        chunk_size=config.chunk_size,
        engine_id=f"test-{uuid.uuid4().hex[:8]}",
        kv_connector_extra_config=None,
    )


@contextlib.contextmanager
def lookup_client(world_size: int = 1, **settings: Any) -> Iterator[Any]:
    """What LMCache's factory builds for these settings."""
    config = lmcache_config(**settings)
    client = LookupClientFactory.create_lookup_client(config, metadata(config, world_size))
    try:
        yield client
    finally:
        end(client)


def end(client: Any) -> None:
    """Close a client, its thread included: it waits in `recv`, which LMCache's own close leaves it in."""
    inner = client
    while hasattr(inner, "actual_lookup_client"):
        if hasattr(inner, "recorder"):
            inner.recorder.close()
        inner = inner.actual_lookup_client
    if hasattr(inner, "pull_socket"):
        inner.running = False
        import zmq

        bound = inner.pull_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        wake = inner.ctx.socket(zmq.PUSH)
        wake.connect(bound)
        wake.send(b"")
        inner.thread.join(2)
        wake.close(linger=0)
        for socket in (*inner.push_sockets, inner.pull_socket):
            socket.close(linger=0)
        Path(bound.removeprefix("ipc://")).unlink(missing_ok=True)
    elif hasattr(inner, "transport"):
        inner.transport.close()
