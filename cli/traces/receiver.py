# SPDX-License-Identifier: Apache-2.0
"""A small OTLP/HTTP receiver on loopback, for the demo and the tests: what each process exports, in one place.

It takes `POST /v1/traces` (protobuf or JSON, gzip or not) as any OpenTelemetry exporter sends it, and keeps the
documents in memory. Not a collector: no storage, no query, no other signal.
"""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from semkv.cli.traces.store import Span, from_protobuf, spans_of

_MAX_BODY = 16 * 2**20


class OTLPReceiver:
    """Listens from `start()` to `stop()` on a free loopback port. Thread-safe."""

    def __init__(self) -> None:
        self._documents: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    @property
    def endpoint(self) -> str:
        """For `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        if self._server is None:
            raise RuntimeError("the OTLP receiver was not started")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def documents(self) -> list[dict[str, Any]]:
        """What was received so far, as OTLP JSON documents."""
        with self._lock:
            return list(self._documents)

    def spans(self) -> list[Span]:
        """Every span received so far."""
        return [span for document in self.documents() for span in spans_of(document)]

    def start(self) -> OTLPReceiver:
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                if self.path != "/v1/traces" or length > _MAX_BODY:
                    self.send_error(404 if self.path != "/v1/traces" else 413)
                    return
                body = self.rfile.read(length)
                try:
                    if self.headers.get("Content-Encoding") == "gzip":
                        body = gzip.decompress(body)
                    is_json = "json" in self.headers.get("Content-Type", "")
                    keep(json.loads(body) if is_json else from_protobuf(body))
                except Exception as error:
                    self.send_error(400, str(error)[:200])
                    return
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="semkv-otlp-receiver", daemon=True).start()
        return self

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> OTLPReceiver:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _keep(self, document: dict[str, Any]) -> None:
        with self._lock:
            self._documents.append(document)
