# SPDX-License-Identifier: Apache-2.0
"""The `semkv` command: puts the commands together."""

from __future__ import annotations

import logging
import sys

import typer

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

EXIT_CODES = (
    "Exit codes: 0 done; 1 done, but not all of it; 2 bad input; 3 nobody there to ask (no server, no engine); "
    "130 interrupted."
)

app = typer.Typer(
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


def main() -> None:
    """Entry point of the `semkv` script."""
    # A command says in one line what went wrong; the libraries' own warnings would say it again.
    logging.getLogger("semkv").setLevel(logging.ERROR)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
