# SPDX-License-Identifier: Apache-2.0
"""`semkv trace FILE [ID]`: the traces of an OTLP JSON file, as trees with a waterfall."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, console, fail, print_json
from semkv.cli.traces.store import TraceFileError, by_trace, read_spans
from semkv.cli.traces.tree import print_trace


def trace(
    file: Annotated[Path, typer.Argument(help="An OTLP JSON file, such as the one `semkv demo` writes.")],
    trace_id: Annotated[str | None, typer.Argument(help="A trace id or its first digits; without it, all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a span.")] = False,
) -> None:
    """Print traces as trees.

    Example: semkv trace demo-out/trace.json
    """
    try:
        traces = by_trace(read_spans(file))
    except (TraceFileError, OSError) as error:
        fail(str(error), BAD_INPUT)
    if trace_id is not None:
        traces = {key: spans for key, spans in traces.items() if key.startswith(trace_id.lower())}
        if not traces:
            fail(f"{file}: no trace starts with {trace_id!r}; leave the id out to see all", BAD_INPUT)
    for spans in traces.values():
        if as_json:
            for span in spans:
                print_json(asdict(span))
        else:
            print_trace(console, spans)
            console.print()
