# SPDX-License-Identifier: Apache-2.0
"""Traces: what the exporter of the bus writes is read back and printed as a tree."""

import json

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link
from rich.console import Console
from typer.testing import CliRunner

from semkv.bus.trace_file import OtlpJsonFileExporter
from semkv.cli.app import app
from semkv.cli.traces.store import QUEUE, Span, TraceFileError, by_trace, read_spans
from semkv.cli.traces.tree import print_trace


@pytest.fixture
def file(tmp_path):
    """A file with three spans of two traces, as a real SDK exported them."""
    path = tmp_path / "trace.json"
    provider = TracerProvider(resource=Resource.create({"service.name": "agent"}))
    provider.add_span_processor(SimpleSpanProcessor(OtlpJsonFileExporter(path)))
    tracer = provider.get_tracer("test")
    with (
        tracer.start_as_current_span("prefetch") as parent,
        tracer.start_as_current_span("kv.tier.load disk→cpu", attributes={"kv.bytes": 7_000_000}),
    ):
        pass
    with tracer.start_as_current_span("later hit", links=[Link(parent.get_span_context())]):
        pass
    provider.shutdown()
    return path


def test_what_was_exported_is_read_back(file):
    spans = read_spans(file)
    names = ("kv.tier.load disk→cpu", "prefetch", "later hit")
    child, parent, hit = (next(span for span in spans if span.name == name) for name in names)
    assert child.parent_id == parent.span_id and child.trace_id == parent.trace_id
    assert child.attributes["kv.bytes"] == 7_000_000 and child.service == "agent"
    assert hit.links == ((parent.trace_id, parent.span_id),)
    assert len(parent.trace_id) == 32 and int(parent.trace_id, 16)
    assert [len(group) for group in by_trace(spans).values()] == [2, 1]


def test_the_tree_shows_children_below_their_parent(file):
    console = Console(width=160, record=True, force_terminal=False)
    for spans in by_trace(read_spans(file)).values():
        print_trace(console, spans)
    lines = console.export_text().splitlines()
    parent = next(i for i, line in enumerate(lines) if line.startswith("prefetch"))
    assert lines[parent + 1].startswith("  kv.tier.load disk→cpu") and "7.0 MB" in lines[parent + 1]
    assert any(line.startswith("later hit") and "→" in line for line in lines)


def test_json_lines_are_read_and_other_files_refused(file, tmp_path):
    lines = tmp_path / "lines.json"
    document = json.dumps(json.loads(file.read_text()))
    lines.write_text(f"{document}\n{document}\n")
    assert len(read_spans(lines)) == 2 * len(read_spans(file))
    for text in ("{}", "[1]", "no json", ""):
        lines.write_text(text)
        with pytest.raises(TraceFileError, match="not an OTLP JSON file"):
            read_spans(lines)


def test_the_command_selects_by_prefix_and_says_what_is_wrong(file, tmp_path):
    trace_id = read_spans(file)[0].trace_id
    shown = CliRunner().invoke(app, ["trace", str(file), trace_id[:6], "--json"])
    assert shown.exit_code == 0
    assert {json.loads(line)["trace_id"] for line in shown.stdout.splitlines()} == {trace_id}
    assert CliRunner().invoke(app, ["trace", str(file), "zz"]).exit_code == 2
    assert CliRunner().invoke(app, ["trace", str(tmp_path / "absent.json")]).exit_code == 2


def test_waiting_is_drawn_otherwise_and_an_error_is_said():
    def span(name, start, end, parent="", **more):
        return Span("ab" * 16, name, parent, name, "rank", start, end, **more)

    outcome = {"kv.chunks.loaded": 3, "kv.outcome": "partial"}
    spans = [
        span("process", 0, 10_000_000, attributes=outcome),
        span(QUEUE, 0, 5_000_000, "process", attributes=outcome),
        span("kv.tier.load disk→cpu", 5_000_000, 9_000_000, "process", error="the disk is gone"),
    ]
    console = Console(width=160, record=True, force_terminal=False)
    print_trace(console, spans)
    process, queue, load = console.export_text().splitlines()[2:5]
    assert "█" in process and "3 loaded, partial" in process
    assert "░" in queue and "█" not in queue and "loaded" not in queue, "what came of it stands beside the work"
    assert "error: the disk is gone" in load
