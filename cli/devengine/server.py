# SPDX-License-Identifier: Apache-2.0
"""Starts a real `vllm serve` on the CPU with LMCache as its KV connector, waits until it answers, and ends it.

The server runs in a process group of its own; `stop()` ends the whole group, and `guard` ends it if this process
dies. Everything is blocking: call it from a thread where there is an event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from semkv.cli.devengine import guard
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.requirements import preload_libraries

START_TIMEOUT_S = 300.0


class EngineStartError(RuntimeError):
    """The server did not come up: the message has its last words and the log file's path."""


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. `nats_url` None leaves semkv's hooks out; `lmcache` None serves without any KV cache connector."""

    model: Path
    folder: Path
    lmcache: LMCacheConfig | None
    nats_url: str | None = None
    name: str = "engine"
    served_model: str = "tiny"
    port: int = 0
    block_size: int = 32
    max_model_len: int = 8192
    max_num_seqs: int = 4
    kv_space_gib: float = 1
    threads: int = 1
    tensor_parallel: int = 1
    prefix_caching: bool = False
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The `vllm serve` command line."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", self.served_model, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--block-size", str(self.block_size)),
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        ]
        if self.tensor_parallel > 1:
            command += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.lmcache is not None:
            transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "engine_id": self.name}
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return [*command, *self.arguments]

    def variables(self) -> dict[str, str]:
        """The server's environment: the parent's, without its semkv, LMCache and vLLM settings, plus what CPU needs."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SEMKV_", "LMCACHE_", "VLLM_"))}
        variables = {
            **kept,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_CPU_KVCACHE_SPACE": f"{self.kv_space_gib:g}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            # An OpenMP worker that spins while it waits would take a core from the processes beside it.
            "OMP_WAIT_POLICY": "passive",
            # Without it the scheduler and the worker start their hash chains from different roots.
            "PYTHONHASHSEED": "0",
            "TORCHDYNAMO_DISABLE": "1",
            # LMCache leaves its sockets in the temporary folder, and its counters in one of /tmp: here they go with the
            # engine's own.
            "TMPDIR": str(self.folder / "t"),
            "PROMETHEUS_MULTIPROC_DIR": str(self.folder / "t"),
        }
        if libraries := preload_libraries(Path(sys.prefix)):
            variables["LD_PRELOAD"] = ":".join(libraries)
        if self.lmcache is not None:
            variables["LMCACHE_CONFIG_FILE"] = str(self.lmcache.write(self.folder / "lmcache.yaml"))
        if self.nats_url is not None:
            variables["SEMKV_NATS_URL"] = self.nats_url
        return {**variables, **self.environment}


class VLLMServer:
    """One `vllm serve`. Use as a context manager, or `start()` and `stop()`; `stop()` may be called twice."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.log_path = options.folder / f"{options.name}.log"
        self.port = options.port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, once started."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(
        self, *, timeout_s: float = START_TIMEOUT_S, progress: Callable[[float, str], None] | None = None
    ) -> None:
        """Start and wait until `/health` answers. Raises EngineStartError; nothing is left running then.

        `progress` is called with the seconds waited and the log's newest line, about five times a second.
        """
        if self.port == 0:
            self.port = free_port()
        elif not port_is_free(self.port):
            raise EngineStartError(f"port {self.port} is in use: choose another, or 0 for a free one")
        (self.options.folder / "t").mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(Path(guard.__file__)), *self.options.command(self.port)],
                env=self.options.variables(),
                cwd=self.options.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begin = time.monotonic()
        try:
            while not self._healthy():
                waited = time.monotonic() - begin
                if self._process.poll() is not None:
                    raise EngineStartError(
                        f"vllm serve ended with code {self._process.returncode}: {self._last_words()}"
                    )
                if waited > timeout_s:
                    raise EngineStartError(f"vllm serve did not answer within {timeout_s:.0f} s: {self._last_words()}")
                if progress is not None:
                    progress(waited, self._newest_line())
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the server and every process it started. Returns when they are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        # An interrupt is what vLLM handles in order; what does not leave then is killed.
        for sign, patience in ((signal.SIGINT, timeout_s), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            deadline = time.monotonic() + patience
            while _group_alive(process.pid) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def __enter__(self) -> VLLMServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 120.0) -> dict[str, Any]:
        """POST JSON and return the JSON answer. Raises OSError on no answer, EngineStartError never."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def log(self) -> str:
        """The server's log so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _newest_line(self) -> str:
        lines = self.log().splitlines()
        return _plain(lines[-1]) if lines else ""

    def _last_words(self) -> str:
        lines = [_plain(line) for line in self.log().splitlines()]
        errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
        words = errors[-1] if errors else " / ".join(line for line in lines[-5:] if line)
        return f"{words} (log: {self.log_path})"


def free_port() -> int:
    """A loopback TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a loopback listener could be opened on `port` now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).strip()


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # A zombie still counts as a member of its group: it is gone for us.
    return any(_state_and_group(entry) == (True, group) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _state_and_group(entry: Path) -> tuple[bool, int]:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0
    return fields[0] != "Z", int(fields[2])
