# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Jaeger where its image cannot be pulled: takes OTLP over HTTP and serves the query API's few paths.

`POST /v1/traces` on 4318; on 16686 `GET /api/v3/services`, `/api/v3/traces/{id}` and, in the older shape,
`/api/services` and `/api/traces/{id}`. In memory, no UI, no search. Not Jaeger: it only proves that what semkv sends
and asks for goes both ways. Threads: one a request; one lock.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from semkv.cli.traces.store import spans_of

_MAX_BODY = 16 << 20
_lock = threading.Lock()
_documents: list[dict[str, Any]] = []


class Collector(BaseHTTPRequestHandler):
    """OTLP/HTTP in."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if self.path != "/v1/traces" or length > _MAX_BODY:
            self.send_error(404 if self.path != "/v1/traces" else 413)
            return
        body = self.rfile.read(length)
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        is_json = "json" in self.headers.get("Content-Type", "")
        with _lock:
            _documents.append(json.loads(body) if is_json else _from_protobuf(body))
        _answer(self, {})

    def log_message(self, format: str, *args: object) -> None:
        pass


class Query(BaseHTTPRequestHandler):
    """The query API out."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            _answer(self, {"stand-in": "jaeger"})
        elif path in {"/api/v3/services", "/api/services"}:
            names = sorted({span.service for span in _spans()})
            _answer(self, {"services": names} if path.startswith("/api/v3") else {"data": names})
        elif path.startswith("/api/v3/traces/"):
            found = _of_trace(path.rpartition("/")[2])
            _answer(self, {"result": {"resourceSpans": found}} if found else None)
        elif path.startswith("/api/traces/"):
            _answer(self, _legacy(path.rpartition("/")[2]))
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _from_protobuf(body: bytes) -> dict[str, Any]:
    """An ExportTraceServiceRequest as an OTLP JSON document, which has ids in hex where protobuf's JSON has base64."""
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


def _spans() -> list[Any]:
    with _lock:
        return [span for document in _documents for span in spans_of(document)]


def _of_trace(trace_id: str) -> list[dict[str, Any]]:
    found = []
    with _lock:
        for document in _documents:
            for resource in document.get("resourceSpans", []):
                scopes = [
                    {**scope, "spans": kept}
                    for scope in resource.get("scopeSpans", [])
                    if (kept := [span for span in scope.get("spans", []) if span["traceId"] == trace_id])
                ]
                if scopes:
                    found.append({**resource, "scopeSpans": scopes})
    return found


def _legacy(trace_id: str) -> dict[str, Any] | None:
    spans = [span for span in _spans() if span.trace_id == trace_id]
    if not spans:
        return None
    processes: dict[str, str] = defaultdict(lambda: f"p{len(processes) + 1}")
    rows = [
        {
            "traceID": span.trace_id,
            "spanID": span.span_id,
            "operationName": span.name,
            "processID": processes[span.service],
            "startTime": span.start_ns // 1000,
            "duration": (span.end_ns - span.start_ns) // 1000,
            "references": [{"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_id}]
            if span.parent_id
            else [],
        }
        for span in spans
    ]
    names = {process: {"serviceName": service} for service, process in processes.items()}
    return {"data": [{"traceID": trace_id, "spans": rows, "processes": names}]}


def _answer(handler: BaseHTTPRequestHandler, value: Any) -> None:
    body = json.dumps(value if value is not None else {"error": "trace not found"}).encode()
    handler.send_response(200 if value is not None else 404)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def serve(host: str, otlp_port: int, query_port: int) -> tuple[ThreadingHTTPServer, ThreadingHTTPServer]:
    """Both servers, running in daemon threads."""
    servers = ThreadingHTTPServer((host, otlp_port), Collector), ThreadingHTTPServer((host, query_port), Query)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    return servers


if __name__ == "__main__":
    serve("0.0.0.0", int(os.environ.get("OTLP_PORT", "4318")), int(os.environ.get("QUERY_PORT", "16686")))
    threading.Event().wait()
