# SPDX-License-Identifier: Apache-2.0
"""The one place that knows OpenTelemetry's metrics, and the list of what semkv's engine side counts.

`setup_metrics` gives a `Metrics` that exports by OTLP/HTTP, as the standard variables say: on where
`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` is set, unless `OTEL_METRICS_EXPORTER` leaves
`otlp` out or `OTEL_SDK_DISABLED` is true; `OTEL_METRIC_EXPORT_INTERVAL` says how often. Off, it gives a `NullMetrics`,
which imports nothing, starts no thread and does nothing. Counters and gauges are watched: whoever counts keeps plain
numbers, which are read when they are exported, on OpenTelemetry's own thread. Only histograms are told each value. The
gateway's Prometheus page is its own (`semkv.consumers.gateway.metrics`).

Threads: `record` any, but never a scheduler or forward thread; sources run on the export thread and must not
block. Errors: none reach the caller; a source that fails leaves its metric out, and an exporter's trouble is
OpenTelemetry's to log. Global state is not touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from semkv.bus.steps import Attribute

log = logging.getLogger(__name__)

COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Labels = Mapping[str, Attribute]
Source = Callable[[], Iterable[tuple[float, Labels]]]
"""Gives a watched metric's present values with their labels; a counter's are totals since the start."""


@dataclass(frozen=True)
class Metric:
    """One metric. Prometheus makes names of its own: `semkv.rank.moved` is `semkv_rank_moved_bytes_total` there."""

    name: str
    kind: str
    unit: str
    description: str


COMMANDS = Metric("semkv.rank.commands", COUNTER, "{command}", "Results of this rank by operation and state")
CHUNKS = Metric("semkv.rank.chunks", COUNTER, "{chunk}", "Chunks of results by operation and status")
MOVED = Metric("semkv.rank.moved", COUNTER, "By", "Bytes loaded or freed by operation and tier")
QUEUE = Metric("semkv.rank.queue.duration", HISTOGRAM, "s", "From publishing a command to its start, by operation")
RUN = Metric("semkv.rank.run.duration", HISTOGRAM, "s", "From a command's start to its result, by operation")
WAITING = Metric("semkv.rank.waiting", GAUGE, "{command}", "Commands without a result so far")
UNREADABLE = Metric("semkv.rank.unreadable", COUNTER, "{message}", "Commands that could not be read, by kind")
TIER_USED = Metric("semkv.rank.tier.used", GAUGE, "By", "Bytes held in a tier")
TIER_CAPACITY = Metric("semkv.rank.tier.capacity", GAUGE, "By", "Capacity of a tier")
TIER_CHUNKS = Metric("semkv.rank.tier.chunks", GAUGE, "{chunk}", "Chunks held in a tier")
FOREST = Metric("semkv.rank.forest.size", GAUGE, "{entry}", "What the prefix forest holds, by kind")
PREFETCHED = Metric("semkv.rank.prefetched", COUNTER, "{chunk}", "Prefetched chunks by what they were worth")

EVENTS = Metric(
    "semkv.publisher.events",
    COUNTER,
    "{event}",
    "Finished events that the server has answered to; one sent twice counts twice",
)
EVENTS_DROPPED = Metric("semkv.publisher.dropped", COUNTER, "{event}", "Finished events that the ring dropped")
EVENTS_WAITING = Metric("semkv.publisher.waiting", GAUGE, "{event}", "Finished events in the ring")
RESTARTS = Metric("semkv.publisher.restarts", COUNTER, "{restart}", "Times the publisher's thread started over")

ALL = (
    COMMANDS, CHUNKS, MOVED, QUEUE, RUN, WAITING, UNREADABLE, TIER_USED, TIER_CAPACITY, TIER_CHUNKS, FOREST, PREFETCHED,
    EVENTS, EVENTS_DROPPED, EVENTS_WAITING, RESTARTS,
)  # fmt: skip


class NullMetrics:
    """Metrics are off."""

    enabled = False

    def record(self, metric: Metric, value: float, labels: Labels) -> None:
        """One value of a histogram."""

    def watch(self, metric: Metric, source: Source) -> None:
        """Exports what `source` gives at that time. A second source of the same metric adds to it."""

    def shutdown(self, timeout_s: float = 1.0) -> None:
        """Exports once more, for at most this long, and ends."""


class Metrics(NullMetrics):
    """Metrics are on: instruments of one OpenTelemetry provider."""

    enabled = True

    def __init__(self, provider: Any, about: Labels) -> None:
        self._provider = provider
        self._about = dict(about)
        self._pid = os.getpid()
        self._meter = provider.get_meter("semkv")
        self._histograms: dict[str, Any] = {}
        self._sources: dict[str, list[Source]] = {}

    def record(self, metric: Metric, value: float, labels: Labels) -> None:
        found = self._histograms.get(metric.name)
        if found is None:
            found = self._meter.create_histogram(metric.name, metric.unit, metric.description)
            self._histograms[metric.name] = found
        found.record(value, {**self._about, **labels})

    def watch(self, metric: Metric, source: Source) -> None:
        sources = self._sources.setdefault(metric.name, [])
        sources.append(source)
        if len(sources) > 1:
            return
        from opentelemetry.metrics import Observation

        def observe(options: Any) -> list[Any]:
            found: list[Any] = []
            # OpenTelemetry starts its export thread anew in a forked child: what we watch stayed with the parent.
            for each in tuple(sources) if os.getpid() == self._pid else ():
                try:
                    found += [Observation(value, {**self._about, **labels}) for value, labels in each()]
                except Exception:
                    log.debug("%s has no value now", metric.name, exc_info=True)
            return found

        counter = metric.kind == COUNTER
        make = self._meter.create_observable_counter if counter else self._meter.create_observable_gauge
        make(metric.name, [observe], metric.unit, metric.description)

    def shutdown(self, timeout_s: float = 1.0) -> None:
        try:
            self._provider.shutdown(timeout_millis=timeout_s * 1000)
        except Exception:  # OpenTelemetry's own word for an exporter that did not end in time
            log.debug("the metrics' exporter did not end in order", exc_info=True)


def wanted(env: Mapping[str, str] | None = None) -> bool:
    """Whether metrics would go anywhere."""
    env = os.environ if env is None else env
    exporters = {name.strip() for name in (env.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")}
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not disabled and "otlp" in exporters and any(env.get(name) for name in _ENDPOINTS)


def setup_metrics(service_name: str, about: Labels) -> NullMetrics:
    """The metrics of a process or a part of one; `about` is on every value. The caller ends it with `shutdown()`."""
    if not wanted():
        return NullMetrics()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service_name, **about})
    provider = MeterProvider(
        [PeriodicExportingMetricReader(OTLPMetricExporter())],
        resource,
        # The way out of a process must not wait for a receiver that is away.
        shutdown_on_exit=False,
        views=[View(instrument_name="*.duration", aggregation=ExplicitBucketHistogramAggregation(_BUCKETS))],
    )
    return Metrics(provider, about)
