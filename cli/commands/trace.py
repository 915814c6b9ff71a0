# SPDX-License-Identifier: Apache-2.0
"""`semkv trace SOURCE [ID]`: the traces of an OTLP JSON file or of Jaeger, as trees with a waterfall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, UNREACHABLE, console, fail, print_json
from semkv.cli.traces.jaeger import JaegerError, fetch
from semkv.cli.traces.store import Span, TraceFileError, by_trace, read_spans
from semkv.cli.traces.tree import print_trace


def trace(
    source: Annotated[
        str, typer.Argument(help="An OTLP JSON file, such as the one `semkv demo` writes, or with --jaeger a trace id.")
    ],
    trace_id: Annotated[str | None, typer.Argument(help="A trace id or its first digits; without it, all.")] = None,
    jaeger: Annotated[
        str | None, typer.Option(help="Ask Jaeger at this address.", envvar="SEMKV_JAEGER_URL", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a span.")] = False,
) -> None:
    """Print traces as trees.

    Examples: semkv trace demo-out/trace.json; semkv trace --jaeger http://127.0.0.1:16686 TRACE_ID
    """
    file = Path(source)
    if jaeger and trace_id is None and not file.exists():
        try:
            spans = fetch(jaeger, source)
        except JaegerError as error:
            fail(str(error), UNREACHABLE)
        _print(by_trace(spans), as_json)
        return
    try:
        traces = by_trace(read_spans(file))
    except (TraceFileError, OSError) as error:
        fail(str(error), BAD_INPUT)
    if trace_id is not None:
        traces = {key: spans for key, spans in traces.items() if key.startswith(trace_id.lower())}
        if not traces:
            fail(f"{file}: no trace starts with {trace_id!r}; leave the id out to see all", BAD_INPUT)
    _print(traces, as_json)


def _print(traces: Mapping[str, Sequence[Span]], as_json: bool) -> None:
    for spans in traces.values():
        if as_json:
            for span in spans:
                print_json(asdict(span))
        else:
            print_trace(console, spans)
            console.print()
