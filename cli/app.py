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

app = typer.Typer(
    help="Steer the KV cache of LLM engines from an agent's memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    demo.demo,
    engines.engines,
    watch.watch,
    prefetch.prefetch,
    evict.evict,
    locate.locate,
    trace.trace,
    engine.engine,
    gateway.gateway,
    doctor.doctor,
    top.top,
    auth.auth,
    schema.schema,
    record.record,
    replay.replay,
    why.why,
):
    # A hash may begin with a minus sign; what is no hash either is refused as one.
    takes_hashes = command in {prefetch.prefetch, evict.evict, locate.locate}
    app.command(context_settings={"ignore_unknown_options": takes_hashes})(command)


def main() -> None:
    """Entry point of the `semkv` script."""
    # A command says in one line what went wrong; the libraries' own warnings would say it again.
    logging.getLogger("semkv").setLevel(logging.ERROR)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
