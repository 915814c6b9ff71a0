# SPDX-License-Identifier: Apache-2.0
"""OTLP documents: protobuf requests as OTLP JSON, and the spans of such a document.

OTLP's JSON form has trace and span ids in hex, where protobuf's own JSON mapping would give base64. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from semkv.cli.traces.store import Span, span_of


def spans_of(document: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of one OTLP JSON document, each with its resource's service name. KeyError, TypeError on others."""
    for resource_spans in document.get("resourceSpans", []):
        attributes = resource_spans.get("resource", {}).get("attributes", [])
        service = next((a["value"].get("stringValue", "") for a in attributes if a["key"] == "service.name"), "")
        for scope in resource_spans.get("scopeSpans", []):
            for span in scope.get("spans", []):
                yield span_of({**span, "service": service})


def from_protobuf(body: bytes) -> dict[str, Any]:
    """An ExportTraceServiceRequest as an OTLP JSON document. Raises protobuf's DecodeError on other bytes."""
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
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
