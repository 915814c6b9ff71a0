# SPDX-License-Identifier: Apache-2.0
"""Spans as people look at them: of an OTLP JSON document or file, grouped by trace. Pure but for reading the file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUEUE = "queue"
"""The name of spans in which a command waited."""


class TraceFileError(ValueError):
    """The file is not OTLP JSON; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Span:
    """One span. Times are unix nanoseconds; `links` are (trace id, span id)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    error: str | None = None

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def read_spans(path: Path) -> list[Span]:
    """Every span of an OTLP JSON file: one object, or one object a line. Raises TraceFileError, OSError."""
    from semkv.bus import trace_file

    try:
        return [span for document in trace_file.documents(path.read_text()) for span in spans_of(document)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceFileError(f"{path}: not an OTLP JSON file ({type(error).__name__}: {error})") from error


def spans_of(document: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of one OTLP JSON document, each with its resource's service name. KeyError, TypeError on others."""
    for resource in document["resourceSpans"]:
        service = str(_attributes(resource.get("resource", {})).get("service.name") or "?")
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                yield _span(span, service)


def by_trace(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans grouped by trace id, each group ordered by start; the wait of a command stands before its work."""
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, span.name != QUEUE, -span.end_ns)):
        groups[span.trace_id].append(span)
    return dict(groups)


def _span(span: Mapping[str, Any], service: str) -> Span:
    status = span.get("status", {})
    return Span(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span.get("name", "?"),
        service=service,
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span),
        links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", [])),
        error=status.get("message", "error") if status.get("code") in (2, "STATUS_CODE_ERROR") else None,
    )


def _attributes(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {entry["key"]: _value(entry.get("value", {})) for entry in owner.get("attributes", [])}


def _value(value: Mapping[str, Any]) -> Any:
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "arrayValue":
            return [_value(item) for item in content.get("values", [])]
        return content
    return None
