# SPDX-License-Identifier: Apache-2.0
"""One nats-server, one real vLLM with LMCache and semkv, and a gateway, for the whole folder."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests need vLLM: run them with make test")

from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import TINY
from semkv.cli.devengine.server import VLLMServer
from semkv.consumers.gateway.main import server
from semkv.consumers.gateway.settings import GatewaySettings
from tests.support.vllm_server import tiny_server

CHUNK = 64
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class World:
    """The running things, and how to use them as an agent's program would."""

    nats: EmbeddedServer
    engine: VLLMServer
    gateway: str

    def run(self, example: str, *arguments: str, **environment: str) -> str:
        """Runs an example as a program; its output."""
        return self.python(str(EXAMPLES / example), *arguments, **environment)

    def python(self, *arguments: str, **environment: str) -> str:
        """Runs Python as an agent's program would be run; its output."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SEMKV_", "OPENAI_"))}
        done = subprocess.run(
            [sys.executable, *arguments],
            env={
                **kept,
                "OPENAI_BASE_URL": f"{self.engine.url}/v1",
                "OPENAI_API_KEY": "unused",
                "SEMKV_NATS_URL": self.nats.url,
                "LLM_URL": self.engine.url,
                "GATEWAY_URL": self.gateway,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        """A greedy chat completion."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **more}  # fmt: skip
        return dict(self.engine.post("/v1/chat/completions", body))

    def rest(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """A call of the gateway: (status, body)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.gateway + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("examples")
    nats = EmbeddedServer(store_dir=folder / "nats")
    nats.start()
    chunk_gib = CHUNK * TINY.kv_bytes_per_token / 2**30
    lmcache = LMCacheConfig(disk=folder / "ssd", chunk_size=CHUNK, ddr_gib=60.5 * chunk_gib)
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    engine = tiny_server(folder / "engine", nats.url, lmcache=lmcache, arguments=tools)
    gateway = server(GatewaySettings(port=0, bus=BusSettings(url=nats.url)))
    thread = threading.Thread(target=lambda: asyncio.run(gateway.serve()))
    try:
        engine.start()
        thread.start()
        while not gateway.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = gateway.servers[0].sockets[0].getsockname()[1]
        yield World(nats, engine, f"http://127.0.0.1:{port}")
    finally:
        gateway.should_exit = True
        if thread.ident is not None:
            thread.join()
        engine.stop()
        nats.stop()
