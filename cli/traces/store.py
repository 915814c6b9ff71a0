# SPDX-License-Identifier: Apache-2.0
"""Spans as OTLP JSON: read from a file or from protobuf requests, grouped by trace, written for Jaeger's UI to open.

OTLP's JSON form has trace and span ids in hex, where protobuf's own JSON mapping would give base64
(source: the OpenTelemetry protocol's section on JSON protobuf encoding).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class TraceFileError(ValueError):
    """The file is not OTLP JSON; the message names the file and what was expected."""


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
    text = path.read_text(encoding="utf-8")
    try:
        documents = [json.loads(text)]
    except json.JSONDecodeError:
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise TraceFileError(f"{path}: not JSON ({error}); an OTLP JSON file was expected") from error
    if not documents or not all(isinstance(document, dict) and "resourceSpans" in document for document in documents):
        raise TraceFileError(f"{path}: has no 'resourceSpans'; an OTLP JSON file was expected")
    return [span for document in documents for span in spans_of(document)]


def write_spans(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Write OTLP documents as one, which Jaeger's UI opens by "JSON File" on its search page."""
    merged = {"resourceSpans": [part for document in documents for part in document.get("resourceSpans", [])]}
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def spans_of(document: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of one OTLP JSON document."""
    for resource_spans in document.get("resourceSpans", []):
        service = _attributes(resource_spans.get("resource", {})).get("service.name", "?")
        for scope in resource_spans.get("scopeSpans", []):
            for span in scope.get("spans", []):
                yield _span(span, str(service))


def by_trace(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans grouped by trace id, each group ordered by start."""
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        groups[span.trace_id].append(span)
    return dict(groups)


def from_protobuf(body: bytes) -> dict[str, Any]:
    """An ExportTraceServiceRequest as an OTLP JSON document. Raises google.protobuf's DecodeError on other bytes."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    document: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    originals = (span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans)
    written = (
        span
        for resource in document.get("resourceSpans", [])
        for scope in resource.get("scopeSpans", [])
        for span in scope.get("spans", [])
    )
    for original, span in zip(originals, written, strict=True):
        span["traceId"], span["spanId"] = original.trace_id.hex(), original.span_id.hex()
        if original.parent_span_id:
            span["parentSpanId"] = original.parent_span_id.hex()
        for link, other in zip(original.links, span.get("links", []), strict=True):
            other["traceId"], other["spanId"] = link.trace_id.hex(), link.span_id.hex()
    return document


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
