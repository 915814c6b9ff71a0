# SPDX-License-Identifier: Apache-2.0
"""A trace as a tree with a waterfall, for the terminal. Waiting in a queue is drawn otherwise than work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from semkv.cli.traces.store import QUEUE, Span

_BAR = 24
_PREFIX = "semkv.v1.{tenant}.{domain}."
"""What every destination begins with, left out of the names."""


def print_trace(console: Console, spans: Sequence[Span]) -> None:
    """Print one trace's spans as a tree: name, service, start and duration in ms, a bar, what moved, links."""
    start = min(span.start_ns for span in spans)
    total = max(max(span.end_ns for span in spans) - start, 1)
    table = Table(box=None, pad_edge=False, expand=False, show_edge=False)
    for heading in ("span", "service", "at ms", "took ms", "", "what"):
        fixed = heading != "what"
        table.add_column(heading, justify="right" if heading.endswith("ms") else "left", overflow="fold", no_wrap=fixed)
    for depth, span in _walk(spans):
        table.add_row(
            Text("  " * depth + span.name.replace(_PREFIX, "…")),
            Text(span.service, style="dim"),
            f"{(span.start_ns - start) / 1e6:.2f}",
            f"{span.duration_ms:.2f}",
            _bar(span, start, total),
            _what(span),
        )
    console.print(f"trace {spans[0].trace_id}: {len(spans)} spans, {total / 1e6:.1f} ms")
    console.print(table)


def _walk(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Depth first, in order of start; a span whose parent is not here stands at the top."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        children[span.parent_id if span.parent_id in known else ""].append(span)
    rows: list[tuple[int, Span]] = []
    pending = [(0, span) for span in reversed(children[""])]
    while pending:
        depth, span = pending.pop()
        rows.append((depth, span))
        pending.extend((depth + 1, child) for child in reversed(children[span.span_id]))
    return rows


def _bar(span: Span, start: int, total: int) -> Text:
    left = int((span.start_ns - start) / total * _BAR)
    width = max(1, round((span.end_ns - span.start_ns) / total * _BAR))
    waits = span.name == QUEUE
    style = "red" if span.error else "yellow" if waits else "cyan"
    return Text(
        " " * min(left, _BAR - 1) + ("░" if waits else "█") * min(width, _BAR - min(left, _BAR - 1)), style=style
    )


def _what(span: Span) -> Text:
    if span.name == QUEUE and not span.links and not span.error:
        return Text()  # it carries what its command came to, which stands beside the work
    chunks = {
        key.removeprefix("kv.chunks."): value for key, value in span.attributes.items() if key.startswith("kv.chunks.")
    }
    parts = [f"{value} {what}" for what, value in chunks.items()]
    if size := span.attributes.get("kv.bytes"):
        parts.append(f"{size / 1e6:.1f} MB")
    if outcome := span.attributes.get("kv.outcome"):
        parts.append(str(outcome))
    parts += [f"→ trace {trace_id[:8]}" for trace_id in dict.fromkeys(link[0] for link in span.links)
              if trace_id != span.trace_id]  # fmt: skip
    if span.error:
        parts.append(f"error: {span.error}")
    return Text(", ".join(parts), style="dim")
