# SPDX-License-Identifier: Apache-2.0
"""One real NATS server, one real vLLM with LMCache and semkv, one real vLLM without any cache, for the whole folder."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semkv.bus import tracing
from semkv.bus.embedded import EmbeddedServer
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import TINY, make_model
from semkv.cli.devengine.server import ServerOptions, VLLMServer
from tests.support.otlp_receiver import OtlpReceiver

pytest.importorskip("vllm", reason="the end-to-end tests need vLLM: run them with make test")

CHUNK = 64
DDR_CHUNKS = 40
SESSION = "billing"


@dataclass(frozen=True)
class Answer:
    """What the OpenAI API answered: the text's token ids, the prompt's, the engine's parameters."""

    id: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]

    @property
    def chunk_hashes(self) -> list[str]:
        return list(self.kv_transfer_params.get("chunk_hashes", ()))


@dataclass(frozen=True)
class World:
    """The running things."""

    nats: EmbeddedServer
    engine: VLLMServer
    plain: VLLMServer
    trace_file: Path
    metrics: OtlpReceiver

    def complete(self, prompt: str, *, plain: bool = False, session: str | None = None, tokens: int = 8) -> Answer:
        """A greedy text completion."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        if session is not None:
            body["kv_transfer_params"] = {"semkv": {"session": session}}
        answer = (self.plain if plain else self.engine).post("/v1/completions", body)
        choice = answer["choices"][0]
        prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        return Answer(answer["id"], choice["token_ids"], prompt_ids, answer.get("kv_transfer_params") or {})

    def stream(self, prompt: str, *, session: str) -> tuple[Answer, int]:
        """A streamed chat completion; also in how many of its parts the hashes came."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
            "kv_transfer_params": {"semkv": {"session": session}},
        }
        request = urllib.request.Request(
            self.engine.url + "/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            lines = [line.decode().strip() for line in response]
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        carriers = [part["kv_transfer_params"] for part in parts if part.get("kv_transfer_params")]
        ids = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids") or ()]
        prompt_ids = next(part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids"))
        return Answer(parts[0]["id"], ids, prompt_ids, carriers[0] if carriers else {}), len(carriers)


def taken_out() -> dict[str, str]:
    """The engine's variables when `make test-taken-out` runs these tests to see them fail."""
    part = os.environ.get("SEMKV_TAKEN_OUT")
    folder = Path(__file__).parent.parent / "taken_out"
    return {"SEMKV_TAKEN_OUT": part, "PYTHONPATH": str(folder)} if part else {}


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Starts everything once; both engines at the same time."""
    folder = tmp_path_factory.mktemp("world")
    nats = EmbeddedServer(store_dir=folder / "nats")
    nats.start()
    model = make_model(folder / "model")
    chunk_gib = CHUNK * TINY.kv_bytes_per_token / 2**30
    lmcache = LMCacheConfig(disk=folder / "ssd", chunk_size=CHUNK, ddr_gib=(DDR_CHUNKS + 0.5) * chunk_gib)
    trace_file, metrics = folder / "trace.json", OtlpReceiver()
    for name in ("engine", "plain"):
        (folder / name).mkdir()
    engine = VLLMServer(
        ServerOptions(
            model=model,
            folder=folder / "engine",
            lmcache=lmcache,
            nats_url=nats.url,
            environment={
                tracing.ENV_FILE: str(trace_file),
                "SEMKV_DEVICE_STAGE_MIB": "4",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": metrics.endpoint,
                "OTEL_METRIC_EXPORT_INTERVAL": "500",
                **taken_out(),
            },
        )
    )
    plain = VLLMServer(ServerOptions(model=model, folder=folder / "plain", name="plain", lmcache=None))
    try:
        with ThreadPoolExecutor(2) as pool, metrics:
            list(pool.map(VLLMServer.start, (engine, plain)))
            yield World(nats, engine, plain, trace_file, metrics)
    finally:
        engine.stop()
        plain.stop()
        nats.stop()
