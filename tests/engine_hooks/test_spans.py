# SPDX-License-Identifier: Apache-2.0
"""The engine's spans: made in the publisher's thread from recorded times, in the trace that the request named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semkv.bus.embedded import EmbeddedServer
from tests.engine_hooks.capture import Capture
from tests.engine_hooks.test_publisher import note, publisher

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def spans(file: Path) -> list[dict[str, Any]]:
    resources = json.loads(file.read_text())["resourceSpans"]
    return [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]


def test_span_tree(nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    monkeypatch.setenv("SEMKV_TRACE_FILE", str(file))
    made = publisher(nats_server.url)
    with Capture(nats_server.url) as seen:
        made.start()
        one = note(1)
        one.traceparent = f"00-{TRACE}-{PARENT}-01"
        one.session = "s"
        one.lookup_ns, one.answered_ns = one.finished_at - 5_000_000, one.finished_at - 2_000_000
        one.hit_tokens = 16
        made.offer(one)
        made.offer(note(2))
        seen.finished("cmpl-2")
        made.close(2.0)
        headers = [h for subject, h, _ in seen.raw if subject.endswith(".finished")]
    mine = {span["name"]: span for span in spans(file) if span["traceId"] == TRACE}
    assert set(mine) == {"kv.lookup", "kv.finished", "publish semkv.v1.{tenant}.{domain}.evt.{instance}.finished"}
    assert mine["kv.lookup"]["parentSpanId"] == mine["kv.finished"]["parentSpanId"] == PARENT
    sending = mine["publish semkv.v1.{tenant}.{domain}.evt.{instance}.finished"]
    assert sending["parentSpanId"] == mine["kv.finished"]["spanId"]
    assert headers[0]["traceparent"] == f"00-{TRACE}-{sending['spanId']}-01"
    assert int(mine["kv.lookup"]["endTimeUnixNano"]) - int(mine["kv.lookup"]["startTimeUnixNano"]) == 3_000_000
    about = {a["key"]: a["value"] for a in mine["kv.finished"]["attributes"]}
    assert about["kv.session_id"] == {"stringValue": "s"}
    assert about["kv.chunks.total"] in ({"intValue": "2"}, {"intValue": 2})
    assert "ff" not in json.dumps(mine["kv.finished"]["attributes"]), "never hash lists"


def test_without_an_exporter_the_context_still_travels(nats_server: EmbeddedServer) -> None:
    made = publisher(nats_server.url)
    with Capture(nats_server.url) as seen:
        made.start()
        one = note(1)
        one.traceparent = f"00-{TRACE}-{PARENT}-01"
        made.offer(one)
        seen.finished("cmpl-1")
        made.close(2.0)
        headers = [h for subject, h, _ in seen.raw if subject.endswith(".finished")]
    assert headers[0]["traceparent"] == f"00-{TRACE}-{PARENT}-01"


def test_retrieve_and_store_of_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmcache")
    from semkv.engine_hooks.engine_spans import engine_spans
    from semkv.engine_hooks.forest_feed import ForestFeed
    from semkv.engine_hooks.lookup_client import TRACE_LABEL
    from tests.engine_hooks.test_forest_feed import Told
    from tests.support.lmcache_engine import lmcache_engine

    file = tmp_path / "trace.json"
    with lmcache_engine(tmp_path / "e") as rig:
        monkeypatch.delenv("SEMKV_TRACE_FILE", raising=False)
        plain = rig.engine.retrieve
        assert engine_spans(rig.engine, {}) is None and rig.engine.retrieve == plain, "off costs nothing"
        monkeypatch.setenv("SEMKV_TRACE_FILE", str(file))
        made = engine_spans(rig.engine, {"kv.rank": 0})
        assert made is not None
        ForestFeed(rig.engine, Told(), rig.chunk_size, made.follow)
        tokens = rig.tokens(2)
        rig.store(tokens)
        request = rig.lookup(tokens, **{TRACE_LABEL: f"00-{TRACE}-{PARENT}-01"})
        assert rig.retrieve(request, tokens) == len(tokens)
        made.close()
    found = {span["name"]: span for span in spans(file)}
    assert set(found) == {"kv.store", "kv.retrieve"}
    assert found["kv.retrieve"]["traceId"] == TRACE and found["kv.retrieve"]["parentSpanId"] == PARENT
    assert found["kv.store"]["traceId"] != TRACE
