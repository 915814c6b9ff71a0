# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server for a test: the tiny model, LMCache with a DDR and an SSD tier, semkv's hooks when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import TINY, ModelShape, make_model
from semkv.cli.devengine.server import ServerOptions, VLLMServer


def tiny_server(
    folder: Path,
    nats_url: str | None,
    *,
    lmcache: LMCacheConfig | None = None,
    shape: ModelShape = TINY,
    model: Path | None = None,
    **options: Any,
) -> VLLMServer:
    """A server, not started, in `folder` (a temporary one). `lmcache` defaults to the small two-tier configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model or make_model(folder / "model", shape)
    lmcache = lmcache or LMCacheConfig(disk=folder / "disk")
    return VLLMServer(ServerOptions(model=model, folder=folder, lmcache=lmcache, nats_url=nats_url, **options))
