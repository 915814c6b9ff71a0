# SPDX-License-Identifier: Apache-2.0
"""`semkv engine`: the development engine, in the foreground."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, UNREACHABLE, errors, fail, print_json

_TELL_S = 15.0
"""How often a start that takes long shows that it goes on."""
_MARK = "[semkv]"
"""What every line of the hooks in an engine's log begins with, behind vLLM's own prefix."""


def engine(
    host: Annotated[str, typer.Option(help="Where to listen. Anything but loopback is open to that network.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The API's port.", min=1, max=65535)] = 8000,
    folder: Annotated[Path, typer.Option(help="Model, SSD tier and log; made if absent.")] = Path("semkv-engine"),
    model: Annotated[
        Path | None, typer.Option(help="A model's folder; without it a tiny one with random weights is made.")
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens of a chunk.", min=32)] = 64,
    ddr_gib: Annotated[float, typer.Option(help="The DDR tier's size.", min=0.01)] = 0.1,
    disk_gib: Annotated[float, typer.Option(help="The SSD tier's size.", min=0.01)] = 1.0,
    name: Annotated[str, typer.Option(help="The instance's name on the bus.", envvar="SEMKV_INSTANCE")] = "engine",
    nats_url: Annotated[
        str | None, typer.Option(help="The NATS server; without it semkv's hooks stay out.", envvar="SEMKV_NATS_URL")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without LMCache and semkv: recomputes everything, to compare with.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it listens as JSON.")] = False,
) -> None:
    """Serve a real vLLM with LMCache on this machine's CPU until Ctrl-C. Ends with 3 if it does not start, or dies.

    What semkv's hooks say in its log is shown once it serves.

    Example: SEMKV_NATS_URL=nats://127.0.0.1:4222 semkv engine --folder /tmp/engine
    """
    from semkv.cli.devengine.lmcache_config import LMCacheConfig
    from semkv.cli.devengine.model import ModelShape, make_model
    from semkv.cli.devengine.server import EngineStartError, ServerOptions, VLLMServer

    _check(port, nats_url, plain)
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        chosen = model or _model(folder / "model", lambda path: make_model(path, ModelShape()))
    except OSError as error:
        fail(f"--folder: {folder}: {error.strerror or error}", BAD_INPUT)
    options = ServerOptions(
        model=chosen,
        folder=folder,
        lmcache=None
        if plain
        else LMCacheConfig(disk=folder / "ssd", chunk_size=chunk_size, ddr_gib=ddr_gib, disk_gib=disk_gib),
        nats_url=None if plain else nats_url,
        name=name,
        port=port,
        arguments=("--host", host),
        environment={} if plain else _settings(nats_url),
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = VLLMServer(options)

    told_s = 0.0

    def going_on(waited_s: float, line: str) -> None:
        nonlocal told_s
        if ended.is_set():
            raise EngineStartError("the start was given up")
        if waited_s - told_s >= _TELL_S:
            told_s = waited_s
            errors.print(f"  {waited_s:.0f} s: {line[:120]}", markup=False, highlight=False, soft_wrap=True)

    try:
        errors.print(f"starting vLLM; its log is {server.log_path}", markup=False, highlight=False, soft_wrap=True)
        server.start(progress=going_on)
        if as_json:
            print_json({"url": server.url, "pid": server.pid, "instance": name})
        else:
            errors.print(f"serving {server.url}; Ctrl-C ends", markup=False, highlight=False, soft_wrap=True)
        for said in _hooks_lines(server.log()):
            errors.print(f"  {said}", markup=False, highlight=False, soft_wrap=True)
        while not ended.wait(0.5):
            if not _alive(server.pid):
                fail(f"vllm serve ended; see {server.log_path}", UNREACHABLE)
    except EngineStartError as error:
        if not ended.is_set():
            fail(str(error), UNREACHABLE)
    finally:
        server.stop()


def _check(port: int, nats_url: str | None, plain: bool) -> None:
    """Ends the command on what would stop the engine, or what the hooks would refuse, a minute from now."""
    from semkv.bus.settings import BusSettings, SettingsError
    from semkv.cli.devengine import requirements
    from semkv.cli.devengine.server import port_is_free
    from semkv.engine_hooks import settings

    if lacking := requirements.missing():
        fail("; ".join(lacking), BAD_INPUT)
    if not port_is_free(port):
        fail(f"--port: {port} is in use: is an engine there already? Choose another", BAD_INPUT)
    if plain:
        return
    try:
        BusSettings.from_env({**os.environ, **({"SEMKV_NATS_URL": nats_url} if nats_url else {})})
        direct = settings.direct(os.environ)
    except (SettingsError, settings.SettingError) as error:
        fail(str(error), BAD_INPUT)
    if not nats_url and not direct:
        errors.print("neither --nats-url nor SEMKV_NATS_URL is given: semkv stays out of this engine", highlight=False)


def _settings(nats_url: str | None) -> dict[str, str]:
    """What the hooks are told. The engine runs in its folder: a file named from here is named from the root there."""
    told = {key: value for key, value in os.environ.items() if key.startswith("SEMKV_")}
    if trace_file := told.get("SEMKV_TRACE_FILE"):
        told["SEMKV_TRACE_FILE"] = str(Path(trace_file).resolve())
    return told | ({"SEMKV_NATS_URL": nats_url} if nats_url else {})


def _hooks_lines(log: str) -> list[str]:
    """What semkv said, each thing once: several processes say some of it."""
    return list(dict.fromkeys(line[line.index(_MARK) :].strip() for line in log.splitlines() if _MARK in line))


def _model(path: Path, make: object) -> Path:
    """The model's folder, made where a finished one is not there yet."""
    if not (path / "config.json").exists():
        assert callable(make)
        make(path)
    return path


def _alive(pid: int | None) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() or ["Z"])[0] != "Z"
    except OSError:
        return False
