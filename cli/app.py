# SPDX-License-Identifier: Apache-2.0
"""The `semkv` command: puts the commands together."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from semkv.cli.commands import (
    auth,
    demo,
    doctor,
    engine,
    engines,
    evict,
    gateway,
    locate,
    prefetch,
    record,
    replay,
    schema,
    top,
    trace,
    watch,
    why,
)
from semkv.cli.output import BAD_INPUT, fail_in_json, wanted

EXIT_CODES = (
    "Exit codes: 0 done; 1 done, but not all of it; 2 bad input; 3 nobody there to ask (no server, no engine); "
    "130 interrupted."
)


class Commands(TyperGroup):
    """The group of all commands. What cannot be parsed is said in JSON too, where `--json` is among the arguments."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        wanted.json = "--json" in args
        return _told(super().make_context, info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        return _told(super().invoke, ctx)


def _told(step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return step(*arguments, **named)
    except Exception as error:
        # Click's errors, whichever click this Typer brings; help and exits are none.
        if (message := getattr(error, "format_message", None)) is not None:
            fail_in_json(message(), getattr(error, "exit_code", BAD_INPUT))
        raise


app = typer.Typer(
    cls=Commands,
    help="Steer the KV cache of LLM engines from an agent's memory.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
PANELS = {
    "See what happens": (
        demo.demo, engines.engines, top.top, watch.watch, locate.locate, trace.trace, why.why, doctor.doctor,
    ),
    "Command the cache": (prefetch.prefetch, evict.evict),
    "Serve": (engine.engine, gateway.gateway),
    "Keep and set up": (record.record, replay.replay, auth.auth, schema.schema),
}  # fmt: skip
for panel, commands in PANELS.items():
    for command in commands:
        # A hash may begin with a minus sign; what is no hash either is refused as one.
        takes_hashes = command in {prefetch.prefetch, evict.evict, locate.locate}
        app.command(
            context_settings={"ignore_unknown_options": takes_hashes}, epilog=EXIT_CODES, rich_help_panel=panel
        )(command)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `semkv` script."""
    # A command says in one line what went wrong; the libraries' own warnings would say it again.
    logging.getLogger("semkv").setLevel(logging.ERROR)
    # What goes on until Ctrl-C also ends in order when a supervisor ends it.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
