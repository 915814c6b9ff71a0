# SPDX-License-Identifier: Apache-2.0
"""Spans in a file, as OTLP JSON: one object `{"resourceSpans": [...]}` that is valid JSON at any time.

Several processes may write the same file: each export takes the file's lock, overwrites the closing brackets with more
entries and closes the brackets again, in one write. Jaeger's UI opens the file; `documents` reads it back, and what
Jaeger answers. A file that is something else is left alone: the export fails and OpenTelemetry logs it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_HEAD = b'{"resourceSpans":[\n'
_TAIL = b"\n]}\n"
_KIND = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "PRODUCER": 4, "CONSUMER": 5}
_STATUS = {"UNSET": 0, "OK": 1, "ERROR": 2}


class OtlpJsonFileExporter(SpanExporter):
    """Appends spans to an OTLP JSON file. Called from OpenTelemetry's export thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not spans:
            return SpanExportResult.SUCCESS
        entries = [json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in _group(spans)]
        try:
            append(self._path, ",\n".join(entries).encode())
        except (OSError, ValueError):
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is buffered here."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def append(path: Path, entries: bytes) -> None:
    """Adds entries of `resourceSpans` to the file. Raises ValueError if the file is not one of ours."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size == 0:
            os.pwrite(descriptor, _HEAD + entries + _TAIL, 0)
            return
        end = size - len(_TAIL)
        if end < len(_HEAD) or os.pread(descriptor, len(_TAIL), end) != _TAIL:
            raise ValueError(f"{path} is not a trace file of semkv")
        os.pwrite(descriptor, b",\n" + entries + _TAIL, end)
    finally:
        os.close(descriptor)


def _group(spans: Sequence[ReadableSpan]) -> list[dict[str, Any]]:
    by_resource: dict[int, tuple[Any, dict[str, list[dict[str, Any]]]]] = {}
    for span in spans:
        _, scopes = by_resource.setdefault(id(span.resource), (span.resource, {}))
        scope = span.instrumentation_scope.name if span.instrumentation_scope else ""
        scopes.setdefault(scope, []).append(_span(span))
    return [
        {
            "resource": {"attributes": _attributes(resource.attributes)},
            "scopeSpans": [{"scope": {"name": name}, "spans": entries} for name, entries in scopes.items()],
        }
        for resource, scopes in by_resource.values()
    ]


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    entry: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": _KIND[span.kind.name],
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": _STATUS[span.status.status_code.name]},
    }
    if span.status.description:
        entry["status"]["message"] = span.status.description
    if span.parent is not None:
        entry["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        entry["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
                "attributes": _attributes(link.attributes or {}),
            }
            for link in span.links
        ]
    return entry


def _attributes(attributes: Any) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def documents(text: str) -> list[dict[str, Any]]:
    """The OTLP JSON objects in a text: one, or several one after another, each as it is or under Jaeger's `result`.

    Raises ValueError on anything else.
    """
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    rest = text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        if isinstance(value, dict):
            value = value.get("result", value)
        if not isinstance(value, dict) or not isinstance(value.get("resourceSpans"), list):
            raise ValueError("an object without resourceSpans")
        found.append(value)
        rest = rest[end:].lstrip()
    if not found:
        raise ValueError("it is empty")
    return found
