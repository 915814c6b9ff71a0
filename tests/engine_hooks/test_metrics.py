# SPDX-License-Identifier: Apache-2.0
"""What the event publisher counts arrives at a metrics backend, losses too, and nothing runs where metrics are off."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from semkv.bus.embedded import EmbeddedServer
from tests.engine_hooks.test_publisher import crash_twice, note, publisher, running, wait_until
from tests.support.otlp_receiver import OtlpReceiver


def test_events_drops_and_what_waits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    server.stop()
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        with running(publisher(server.url, ring=10)) as made:
            for number in range(25):
                made.offer(note(number))
            receiver.wait(lambda r: r.total("semkv.publisher.waiting") == 10)
            assert receiver.total("semkv.publisher.events") == 0
            server.start()
            try:
                receiver.wait(lambda r: r.total("semkv.publisher.events", **{"kv.instance": "e"}) >= 10)
                receiver.wait(lambda r: r.total("semkv.publisher.dropped") == 15)
                receiver.wait(lambda r: r.total("semkv.publisher.waiting") == 0)
                assert receiver.total("semkv.publisher.restarts") == 0
            finally:
                server.stop()
        assert receiver.services == {"semkv-engine"}


def test_what_came_last_is_told_at_the_end_and_how_often_the_thread_started_over(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_twice(monkeypatch)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")  # nothing comes but at the end
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", receiver.endpoint)
        with running(publisher(nats_server.url)) as made:
            made.offer(note(1))
            wait_until(lambda: made.published == 1)
        receiver.wait(lambda r: r.total("semkv.publisher.events") == 1, 10)
        assert receiver.total("semkv.publisher.restarts") == made.restarts == 2


def test_off_starts_no_thread(nats_server: EmbeddedServer) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with running(publisher(nats_server.url)) as made:
        made.offer(note(1))
        wait_until(lambda: made.published == 1)
        new = {thread.name for thread in threading.enumerate()} - before
        assert not [name for name in new if "Metric" in name], new
