# SPDX-License-Identifier: Apache-2.0
"""`semkv trace ID`: one trace, from Jaeger or an OTLP JSON file, or all of a file's, as trees with a waterfall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from semkv.bus import tracing
from semkv.cli.output import BAD_INPUT, UNREACHABLE, console, fail, print_json
from semkv.cli.traces.jaeger import JaegerError, fetch, is_trace_id
from semkv.cli.traces.store import Span, TraceFileError, by_trace, read_spans
from semkv.cli.traces.tree import print_trace

_JAEGER = "http://127.0.0.1:16686"


def trace(
    source: Annotated[str, typer.Argument(metavar="FILE|ID", help="An OTLP JSON file, or a trace's id.")],
    trace_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of a file: a trace's id or its first digits; without, all.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Look for ID in this file.", envvar=tracing.ENV_FILE, show_default=False)
    ] = None,
    jaeger: Annotated[
        str | None,
        typer.Option(
            help=f"Ask Jaeger at this address; default {_JAEGER}.", envvar="SEMKV_JAEGER_URL", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a span.")] = False,
) -> None:
    """Print traces as trees, with a waterfall in which waiting is ░ and links to other traces are named.

    A result's trace_id, as `semkv watch --json` and the gateway show it, is looked for in --file where one is named,
    else in Jaeger. Ends with 2 if there is no such file or trace in it, with 3 if Jaeger does not give it.

    Examples: semkv trace demo-out/trace.json; semkv trace 0af7651916cd43dd8448eb211c80319c --jaeger
    http://127.0.0.1:16686; semkv trace 0af76519 --file demo-out/trace.json
    """
    named = Path(source)
    if trace_id is None and not named.exists():
        if file is None or jaeger is not None:
            _print(_from_jaeger(jaeger or _JAEGER, source, named), as_json)
            return
        named, trace_id = file, source
    try:
        traces = by_trace(read_spans(named))
    except TraceFileError as error:
        fail(str(error), BAD_INPUT)
    except OSError as error:
        fail(f"{named}: {error.strerror or error}", BAD_INPUT)
    if trace_id is not None:
        found = {key: spans for key, spans in traces.items() if key.startswith(trace_id.lower())}
        if not found:
            fail(f"{named}: no trace starts with {trace_id!r:.80}; it has {_some(list(traces))}", BAD_INPUT)
        traces = found
    _print(traces, as_json)


def _from_jaeger(url: str, trace_id: str, file: Path) -> dict[str, list[Span]]:
    if not is_trace_id(trace_id):
        fail(f"{file} is no file, and no trace id (32 hex digits, as a result's trace_id has them)", BAD_INPUT)
    try:
        return by_trace(fetch(url, trace_id))
    except JaegerError as error:
        fail(f"{error}; for a trace in a file: semkv trace ID --file FILE", UNREACHABLE)


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(trace_id[:8] for trace_id in ids[:8])
    return f"{shown} and {len(ids) - 8} more" if len(ids) > 8 else shown or "none"


def _print(traces: Mapping[str, Sequence[Span]], as_json: bool) -> None:
    for spans in traces.values():
        if as_json:
            for span in spans:
                print_json(asdict(span))
        else:
            print_trace(console, spans)
            console.print()
