# SPDX-License-Identifier: Apache-2.0
"""`semkv demo`: the main job, end to end, on a real engine on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from semkv.bus import tracing
from semkv.cli.output import BAD_INPUT, INTERRUPTED, PARTIAL, UNREACHABLE, console, fail


def demo(
    output: Annotated[Path, typer.Option(help="Where trace.json is written.")] = Path("demo-out"),
    port: Annotated[int, typer.Option(help="The engine's port; 0 takes a free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the engines' logs, the model and the SSD tier.")] = False,
) -> None:
    """Play an agent's conversation against a real vLLM with LMCache on this machine's CPU, and check every claim.

    Starts a NATS server and two engines (one without any cache, for comparison), talks about two topics, comes back to
    the first with a prefetch, and prints what happened, with the times and the trace. Takes about four minutes. Ends
    with 1 if a claim is false.

    Example: semkv demo --output /tmp/demo
    """
    from openai import OpenAIError

    from semkv.bus.embedded import EmbeddedServerError
    from semkv.bus.errors import BusError
    from semkv.cli.demo.play import NoEventError
    from semkv.cli.demo.run import run
    from semkv.cli.demo.stack import Stack
    from semkv.cli.devengine import requirements
    from semkv.cli.devengine.server import EngineStartError, port_is_free

    if lacking := requirements.missing():
        fail("; ".join(lacking), BAD_INPUT)
    if port and not port_is_free(port):
        fail(f"port {port} is in use: choose another with --port, or 0 for a free one", BAD_INPUT)
    trace_file = _fresh_trace_file(output)
    # The agent's own spans go where the engine's go.
    os.environ[tracing.ENV_FILE] = str(trace_file)
    stack = Stack(console, trace_file, port=port, keep=keep)
    _interrupt_on_termination()
    code = 0
    try:
        endpoints = stack.start()
        claims = asyncio.run(run(console, endpoints, trace_file))
        code = PARTIAL if claims.broken else 0
    except (EngineStartError, EmbeddedServerError, BusError, NoEventError, OpenAIError) as error:
        stack.keep_logs()
        code = UNREACHABLE
        console.print(f"semkv: {error}", style="bold red", markup=False, highlight=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
        console.print("interrupted: ending what was started …")
    except BaseException:
        stack.keep_logs()
        raise
    finally:
        # A second Ctrl-C while this runs must not leave an engine behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stack.close()
    sys.stdout.flush()
    raise typer.Exit(code)


def _fresh_trace_file(output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    trace_file = (output / "trace.json").resolve()
    trace_file.unlink(missing_ok=True)
    return trace_file


def _interrupt_on_termination() -> None:
    """SIGTERM ends the demo as Ctrl-C does: in order."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
