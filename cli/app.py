# SPDX-License-Identifier: Apache-2.0
"""The `semkv` command: puts the commands together."""

from __future__ import annotations

import sys

import typer

from semkv.cli.commands import demo, trace

app = typer.Typer(
    help="Steer the KV cache of LLM engines from an agent's memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(trace.trace)


def main() -> None:
    """Entry point of the `semkv` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
