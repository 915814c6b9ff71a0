# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a metrics backend: takes OTLP over HTTP as such a backend does, and keeps the newest value of each.

`with OtlpReceiver() as receiver:` then `receiver.endpoint` for `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, and
`receiver.wait(found)` until what has come satisfies `found`. Loopback, a free port; one thread a request, one lock.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

_UNITS = {"By": "_bytes", "s": "_seconds"}
_PARTS = ("bucket", "count", "sum")


class Came(NamedTuple):
    """One metric as it came: kind is `sum`, `gauge` or `histogram`; a histogram's value is its count."""

    kind: str
    unit: str
    monotonic: bool
    values: dict[frozenset[tuple[str, str]], float]


class OtlpReceiver:
    """What has come so far, by name."""

    def __init__(self) -> None:
        self.metrics: dict[str, Came] = {}
        self.sums: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        """Of histograms, beside the counts in `metrics`."""
        self.services: set[str] = set()
        self.requests = 0
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(ExportMetricsServiceRequest.FromString(body))
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/metrics"

    def __enter__(self) -> OtlpReceiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, request: Any) -> None:
        with self._lock:
            self.requests += 1
            for resource in request.resource_metrics:
                attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                self.services.add(attributes.get("service.name", ""))
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self._keep(metric)

    def _keep(self, metric: Any) -> None:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        came = self.metrics.setdefault(metric.name, Came(kind, metric.unit, getattr(data, "is_monotonic", False), {}))
        for point in data.data_points:
            labels = frozenset((pair.key, _text(pair.value)) for pair in point.attributes)
            if kind == "histogram":
                self.sums.setdefault(metric.name, {})[labels] = point.sum
            came.values[labels] = point.count if kind == "histogram" else getattr(point, point.WhichOneof("value"))

    def wait(self, found: Callable[[OtlpReceiver], bool], patience_s: float = 30.0) -> None:
        """Returns once `found` holds; fails with what there is otherwise."""
        deadline = time.monotonic() + patience_s
        while True:
            with self._lock:
                if found(self):
                    return
                if time.monotonic() > deadline:
                    raise AssertionError(f"after {patience_s} s there is only {self.metrics}")
            time.sleep(0.02)

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels; 0 if none came."""
        wanted = set(labels.items())
        came = self.metrics.get(name)
        return sum(value for key, value in came.values.items() if wanted <= key) if came else 0

    def summed(self, name: str, **labels: str) -> float:
        """The same of what a histogram's values add up to."""
        wanted = set(labels.items())
        return sum(value for key, value in self.sums.get(name, {}).items() if wanted <= key)

    def prometheus_names(self) -> set[str]:
        """What Prometheus, which takes OTLP, names these series."""
        return set(self.prometheus_series())

    def prometheus_series(self) -> dict[str, set[str]]:
        """The same with the labels of each."""
        series = {}
        for name, came in self.metrics.items():
            base = name.replace(".", "_") + _UNITS.get(came.unit, "")
            labels = {key.replace(".", "_") for values in came.values for key, _ in values}
            if came.kind == "histogram":
                series |= {f"{base}_{part}": labels | ({"le"} if part == "bucket" else set()) for part in _PARTS}
            else:
                series[f"{base}_total" if came.monotonic else base] = labels
        return series


def _text(value: Any) -> str:
    return str(getattr(value, value.WhichOneof("value")))
