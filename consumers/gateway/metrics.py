# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one gateway, in a registry of its own.

Requests and their times by route; this gateway's commands: rank answers and chunks by what became of them, bytes, and
how long they waited and ran; events and their losses; what prefetches turned out to be worth (from the engines' outcome
events); and gauges of the engines as the registry shows them. What engines count by themselves they export by OTLP
(`semkv.bus.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from semkv.bus.messages import EngineInfo
from semkv.consumers.gateway.answers import Report

__all__ = ["Metrics"]

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Engines:
    """Gauges made when they are asked for."""

    def __init__(self, live: Callable[[], list[EngineInfo]], connected: Callable[[], bool]) -> None:
        self._live = live
        self._connected = connected

    def collect(self) -> Iterable[Any]:
        yield GaugeMetricFamily(
            "semkv_gateway_bus_connected", "1 while NATS can be reached", value=int(self._connected())
        )
        engines = self._live()
        yield GaugeMetricFamily("semkv_engine_ranks", "Live ranks", value=len(engines))
        where = ["instance", "rank", "tier"]
        used = GaugeMetricFamily("semkv_tier_used_bytes", "Bytes held in a tier", labels=where)
        room = GaugeMetricFamily("semkv_tier_capacity_bytes", "Capacity of a tier", labels=where)
        for info in engines:
            for tier in info.tiers:
                used.add_metric([info.instance, str(info.rank), tier.name], tier.used_bytes)
                room.add_metric([info.instance, str(info.rank), tier.name], tier.capacity_bytes)
        yield used
        yield room


class Metrics:
    """What is counted."""

    def __init__(self, live: Callable[[], list[EngineInfo]], connected: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self.requests = Counter(
            "semkv_gateway_requests", "Requests by route and status", ["route", "status"], registry=at
        )
        self.seconds = Histogram(
            "semkv_gateway_request_seconds", "Time to answer", ["route"], buckets=_BUCKETS, registry=at
        )
        self.commands = Counter(
            "semkv_gateway_commands", "Rank answers by operation and state", ["op", "state"], registry=at
        )
        self.chunks = Counter("semkv_gateway_chunks", "Chunks by operation and status", ["op", "status"], registry=at)
        self.moved = Counter(
            "semkv_gateway_moved_bytes", "Bytes that ranks loaded or freed by operation and tier", ["op", "tier"],
            registry=at,
        )  # fmt: skip
        self.queued = Histogram(
            "semkv_gateway_queue_seconds", "From publishing a command to its start on a rank", ["op"], buckets=_BUCKETS,
            registry=at,
        )  # fmt: skip
        self.ran = Histogram(
            "semkv_gateway_run_seconds", "From a command's start on a rank to its result", ["op"], buckets=_BUCKETS,
            registry=at,
        )  # fmt: skip
        self.lost = Counter(
            "semkv_events_lost", "Finished events that never came, by the gaps in their numbers", ["instance"],
            registry=at,
        )  # fmt: skip
        self.events = Counter("semkv_events", "Events seen, by type", ["type"], registry=at)
        self.prefetched = Counter(
            "semkv_prefetched_chunks", "Prefetched chunks by what they were worth", ["fate"], registry=at
        )
        self.streams = Gauge("semkv_gateway_event_streams", "Open event streams", registry=at)
        self.registry.register(_Engines(live, connected))

    def report(self, report: Report, *, dry_run: bool = False) -> None:
        """Counts the answers of a command, once. A dry run is an operation of its own, since it moves nothing."""
        op = "dry_run" if dry_run else report.op
        for result in report.results.values():
            self.commands.labels(op, str(result.state)).inc()
            for status, count in result.counts.items():
                self.chunks.labels(op, str(status)).inc(count)
            for tier, size in {} if dry_run else result.bytes_by_tier.items():
                self.moved.labels(op, str(tier)).inc(size)
            self.queued.labels(op).observe(result.queued_ms / 1e3)
            self.ran.labels(op).observe(result.ran_ms / 1e3)
        silent = len(report.ranks()) - len(report.results)
        if silent:
            self.commands.labels(op, "unanswered").inc(silent)

    def outcome(self, event: Any) -> None:
        """Counts what a prefetch turned out to be worth."""
        for fate in ("useful", "redundant", "late", "wasted"):
            self.prefetched.labels(fate).inc(getattr(event, fate))

    def text(self) -> bytes:
        return generate_latest(self.registry)
