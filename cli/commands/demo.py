# SPDX-License-Identifier: Apache-2.0
"""`semkv demo`: the main job, end to end, on a real engine on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from semkv.bus import tracing
from semkv.cli.output import BAD_INPUT, INTERRUPTED, PARTIAL, UNREACHABLE, console, errors, fail, print_json

if TYPE_CHECKING:
    from semkv.cli.demo.claims import Claims


def demo(
    output: Annotated[Path, typer.Option(help="Where trace.json is written.")] = Path("demo-out"),
    port: Annotated[int, typer.Option(help="The engine's port; 0 takes a free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the engines' logs, the model and the SSD tier.")] = False,
    engine_url: Annotated[
        str | None, typer.Option(help="Use this engine, which runs already with semkv on, and start nothing.")
    ] = None,
    plain_engine_url: Annotated[
        str | None, typer.Option(help="With --engine-url: an engine without any cache, to compare outputs with.")
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="With --engine-url: the NATS server; default SEMKV_NATS_URL.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The claims as one JSON object; what happens is told on stderr.")
    ] = False,
) -> None:
    """Play an agent's conversation against a real vLLM with LMCache on this machine's CPU, and check every claim.

    Starts a NATS server and two engines (one without any cache, for comparison), talks about two topics, comes back to
    the first with a prefetch, and prints what happened, with the times and the trace. Takes about four minutes. Ends
    with 1 if a claim is false.

    With --engine-url the same conversation is held with an engine that runs already, say `semkv engine`'s; its chunks
    are evicted from DDR and prefetched, and nobody else's.

    Examples: semkv demo --output /tmp/demo; semkv demo --engine-url http://127.0.0.1:8000; semkv demo --json
    """
    from openai import OpenAIError

    from semkv.bus.embedded import EmbeddedServerError
    from semkv.bus.errors import BusError
    from semkv.cli.demo.play import NoEventError
    from semkv.cli.demo.run import run
    from semkv.cli.demo.stack import Stack
    from semkv.cli.devengine import requirements
    from semkv.cli.devengine.server import EngineStartError, port_is_free

    if engine_url is None and (plain_engine_url or nats_url):
        fail("--plain-engine-url and --nats-url go with --engine-url: name the engine too", BAD_INPUT)
    if engine_url is not None:
        _attached(engine_url, plain_engine_url, nats_url, output, as_json)
    if lacking := requirements.missing():
        fail("; ".join(lacking), BAD_INPUT)
    if port and not port_is_free(port):
        fail(f"port {port} is in use: choose another with --port, or 0 for a free one", BAD_INPUT)
    trace_file = _fresh_trace_file(output)
    told = errors if as_json else console
    # The agent's own spans go where the engine's go.
    os.environ[tracing.ENV_FILE] = str(trace_file)
    stack = Stack(told, trace_file, port=port, keep=keep)
    _interrupt_on_termination()
    code = 0
    try:
        endpoints = stack.start()
        claims = asyncio.run(run(told, endpoints, trace_file))
        code = PARTIAL if claims.broken else 0
        if as_json:
            _print_json(claims, trace_file)
    except (EngineStartError, EmbeddedServerError, BusError, NoEventError, OpenAIError) as error:
        stack.keep_logs()
        code = UNREACHABLE
        told.print(f"semkv: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
        told.print("interrupted: ending what was started …")
    except BaseException:
        stack.keep_logs()
        raise
    finally:
        # A second Ctrl-C while this runs must not leave an engine behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stack.close()
    sys.stdout.flush()
    raise typer.Exit(code)


def _attached(
    engine_url: str, plain_engine_url: str | None, nats_url: str | None, output: Path, as_json: bool
) -> NoReturn:
    """The play with an engine that runs already."""
    from openai import OpenAIError

    from semkv.bus.errors import BusError
    from semkv.bus.settings import BusSettings, SettingsError
    from semkv.cli.demo.play import NoEventError
    from semkv.cli.demo.run import run
    from semkv.cli.demo.stack import attach
    from semkv.cli.devengine.server import EngineStartError

    try:
        nats = nats_url or BusSettings.from_env().url
        plain = plain_engine_url.rstrip("/") if plain_engine_url else None
        endpoints = attach(engine_url.rstrip("/"), plain, nats)
        claims = asyncio.run(run(errors if as_json else console, endpoints, output / "trace.json"))
    except (EngineStartError, BusError, SettingsError, NoEventError, OpenAIError) as error:
        fail(str(error), UNREACHABLE)
    if as_json:
        _print_json(claims, None)
    raise typer.Exit(PARTIAL if claims.broken else 0)


def _print_json(claims: Claims, trace_file: Path | None) -> None:
    print_json(
        {
            "holds": not claims.broken,
            "claims": [asdict(claim) for claim in claims.made],
            "trace_file": None if trace_file is None else str(trace_file),
        }
    )


def _fresh_trace_file(output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    trace_file = (output / "trace.json").resolve()
    trace_file.unlink(missing_ok=True)
    return trace_file


def _interrupt_on_termination() -> None:
    """SIGTERM ends the demo as Ctrl-C does: in order."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
