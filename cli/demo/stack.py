# SPDX-License-Identifier: Apache-2.0
"""What the demo runs on: a NATS server, an engine with LMCache and semkv, and an engine without any cache.

Everything lives in one temporary folder and ends with `close()`, which may be called at any moment, also half-way
through the start.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from semkv.bus import tracing
from semkv.bus.embedded import EmbeddedServer
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import ModelShape, make_model
from semkv.cli.devengine.server import EngineStartError, ServerOptions, VLLMServer
from semkv.cli.progress import Row, StartProgress

SHAPE = ModelShape(layers=12, hidden=768, heads=12, kv_heads=12, intermediate=2048)
"""Prefill of 3,000 tokens takes seconds on two cores; their KV is 221 MB."""
CHUNK_SIZE = 256
DDR_CHUNKS = 24
"""A prefetch fills at most half the pool, and the first topic has eleven chunks."""
DISK_GIB = 4.0
SERVED = "demo"


@dataclass(frozen=True)
class Endpoints:
    """Where the demo's parts answer."""

    nats: str
    engine: str
    plain_engine: str | None
    served: str = SERVED
    own: bool = True
    """Started by the demo, so that sizes, hashes and the trace file are known."""


def attach(engine: str, plain_engine: str | None, nats: str) -> Endpoints:
    """What runs already. Raises EngineStartError where no engine answers."""
    served = _served(engine)
    if plain_engine is not None and (other := _served(plain_engine)) != served:
        raise EngineStartError(f"{plain_engine} serves {other!r} and {engine} {served!r}: outputs would not compare")
    return Endpoints(nats, engine, plain_engine, served, own=False)


def _served(engine: str) -> str:
    try:
        with urllib.request.urlopen(f"{engine}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineStartError(f"no vLLM answers at {engine}: {getattr(error, 'reason', error)}") from None


class Stack:
    """Starts and ends the parts. `start()` shows progress and returns their endpoints."""

    def __init__(self, console: Console, trace_file: Path, *, port: int = 0, keep: bool = False) -> None:
        self._console = console
        self._trace_file = trace_file
        self._port = port
        self._keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix="semkv-demo-"))
        self._nats: EmbeddedServer | None = None
        self._engines: list[VLLMServer] = []
        self._closing = threading.Event()

    def start(self) -> Endpoints:
        """Start everything. Raises EngineStartError, EmbeddedServerError; call `close()` whatever happens."""
        with StartProgress(self._console) as progress:
            row = progress.row("NATS server")
            self._nats = EmbeddedServer(self.folder / "nats")
            self._nats.start()
            row.done(self._nats.url)

            row = progress.row("model")
            model = make_model(self.folder / "model", SHAPE)
            row.done("random weights, made here")

            chunk_gib = CHUNK_SIZE * SHAPE.kv_bytes_per_token / 2**30
            lmcache = LMCacheConfig(
                disk=self.folder / "ssd",
                chunk_size=CHUNK_SIZE,
                # Half a chunk more than the chunks it is to hold: the allocator aligns each.
                ddr_gib=(DDR_CHUNKS + 0.5) * chunk_gib,
                disk_gib=DISK_GIB,
            )
            options = ServerOptions(
                model=model, served_model=SERVED, threads=2, folder=self._subfolder("plain"), name="plain", lmcache=None
            )
            plain = VLLMServer(options)
            engine = VLLMServer(
                replace(
                    options,
                    folder=self._subfolder("engine"),
                    name="demo",
                    lmcache=lmcache,
                    nats_url=self._nats.url,
                    port=self._port,
                    environment={tracing.ENV_FILE: str(self._trace_file)},
                )
            )
            self._engines = [engine, plain]
            rows = [progress.row("vLLM with LMCache and semkv"), progress.row("vLLM without any cache")]
            # Side by side: most of a start is waiting for imports and for one another's processes.
            with ThreadPoolExecutor(max_workers=2) as pool:
                started = [
                    pool.submit(self._start_engine, server, row)
                    for server, row in zip(self._engines, rows, strict=True)
                ]
                try:
                    for future in started:
                        future.result()
                except BaseException:
                    self._closing.set()
                    raise
        return Endpoints(self._nats.url, engine.url, plain.url)

    def close(self) -> None:
        """End everything and remove the folder, unless it is to be kept."""
        self._closing.set()
        for engine in self._engines:
            engine.stop()
        if self._nats is not None:
            self._nats.stop()
        if self._keep:
            self._console.print(f"logs and data kept in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def keep_logs(self) -> None:
        """Do not remove the folder at the end: something went wrong and its logs say what."""
        self._keep = True

    def _start_engine(self, server: VLLMServer, row: Row) -> None:
        def show(_: float, line: str) -> None:
            if self._closing.is_set():
                raise EngineStartError("the start was given up")
            row.detail(line)

        server.start(progress=show)
        row.done(server.url)

    def _subfolder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder
