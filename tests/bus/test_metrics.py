# SPDX-License-Identifier: Apache-2.0
"""Metrics: where they go by the standard variables, what arrives at a receiver, and that off costs nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from semkv.bus import metrics
from semkv.bus.metrics import Metrics, NullMetrics, setup_metrics, wanted
from tests.support.otlp_receiver import OtlpReceiver

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """A receiver that this process exports to, often."""
    with OtlpReceiver() as found:
        monkeypatch.setenv(METRICS_ENDPOINT, found.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        yield found


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        ({ENDPOINT: "http://x:4318"}, True),
        ({METRICS_ENDPOINT: "http://x:4318/v1/metrics"}, True),
        ({METRICS_ENDPOINT: ""}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, False),
        ({ENDPOINT: "http://x:4318", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://x:4318", "OTEL_METRICS_EXPORTER": "console, otlp"}, True),
        ({ENDPOINT: "http://x:4318", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_the_standard_variables_decide(env: dict[str, str], on: bool) -> None:
    assert wanted(env) is on


def test_what_is_counted_and_watched_arrives(receiver: OtlpReceiver) -> None:
    found = setup_metrics("semkv-test", {"kv.instance": "e", "kv.rank": 1})
    try:
        assert found.enabled
        held = {"cpu": 10}
        found.watch(metrics.TIER_USED, lambda: [(size, {"tier": tier}) for tier, size in held.items()])
        found.watch(metrics.EVENTS, lambda: [(3, {})])
        prefetches, evicts = {"op": "prefetch", "state": "succeeded"}, {"op": "evict", "state": "failed"}
        found.watch(metrics.COMMANDS, lambda: [(1, prefetches), (2, evicts)])
        for seconds in (0.001, 0.2):
            found.record(metrics.RUN, seconds, {"op": "prefetch"})
        receiver.wait(lambda r: r.total("semkv.rank.tier.used", tier="cpu") == 10)
        held["cpu"] = 20
        receiver.wait(lambda r: r.total("semkv.rank.tier.used", tier="cpu") == 20)
    finally:
        found.shutdown()
    assert receiver.services == {"semkv-test"}
    assert receiver.total("semkv.rank.commands", op="evict", state="failed") == 2
    assert receiver.total("semkv.rank.commands", **{"kv.instance": "e", "kv.rank": "1"}) == 3
    assert receiver.total("semkv.rank.run.duration", op="prefetch") == 2
    assert receiver.total("semkv.publisher.events") == 3
    assert {"semkv_rank_commands_total", "semkv_rank_run_duration_seconds_bucket", "semkv_rank_tier_used_bytes",
            "semkv_publisher_events_total"} <= receiver.prometheus_names()  # fmt: skip


def test_the_last_values_arrive_at_the_end(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
    found = setup_metrics("semkv-test", {})
    found.watch(metrics.CHUNKS, lambda: [(5, {"op": "evict", "status": "removed"})])
    found.shutdown(5)
    assert receiver.total("semkv.rank.chunks", status="removed") == 5


def test_a_source_that_fails_costs_its_own_values_only(receiver: OtlpReceiver) -> None:
    found = setup_metrics("semkv-test", {})

    def broken() -> list[tuple[float, dict[str, str]]]:
        raise RuntimeError("no figures")

    try:
        found.watch(metrics.FOREST, broken)
        found.watch(metrics.FOREST, lambda: [(7, {"kind": "chunks"})])
        found.watch(metrics.WAITING, lambda: [(1, {})])
        receiver.wait(lambda r: r.total("semkv.rank.waiting") == 1)
        receiver.wait(lambda r: r.total("semkv.rank.forest.size", kind="chunks") == 7)
    finally:
        found.shutdown()


def test_a_forked_child_does_not_tell_what_its_parent_holds(receiver: OtlpReceiver) -> None:
    found = setup_metrics("semkv-test", {})
    holder = os.getpid()
    try:
        found.watch(metrics.WAITING, lambda: [(1, {"pid": "parent" if os.getpid() == holder else "child"})])
        receiver.wait(lambda r: r.total("semkv.rank.waiting") == 1)
        child = os.fork()
        if child == 0:
            time.sleep(0.5)
            os._exit(0)
        os.waitpid(child, 0)
        before = receiver.requests
        receiver.wait(lambda r: r.requests > before)
        assert receiver.total("semkv.rank.waiting", pid="child") == 0
    finally:
        found.shutdown()


@pytest.mark.timeout(25)
def test_the_end_does_not_wait_for_a_receiver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's own patience, 30 s here, is over the mark."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(METRICS_ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/metrics")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "3600")
        found = setup_metrics("semkv-test", {})
        found.record(metrics.RUN, 1, {"op": "evict"})
        found.shutdown(0.5)


def test_off_imports_nothing_and_does_nothing() -> None:
    found = setup_metrics("semkv-test", {})
    assert type(found) is NullMetrics and not isinstance(found, Metrics)
    found.record(metrics.RUN, 1, {})
    found.watch(metrics.WAITING, lambda: [(1, {})])
    found.shutdown()
    code = (
        "import sys, threading; from semkv.bus.metrics import setup_metrics; setup_metrics('x', {}); "
        "assert threading.active_count() == 1; sys.exit(any('opentelemetry' in name for name in sys.modules))"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_two_metrics_have_one_name() -> None:
    assert len({metric.name for metric in metrics.ALL}) == len(metrics.ALL)
    assert set(metrics.ALL) == {value for value in vars(metrics).values() if isinstance(value, metrics.Metric)}
