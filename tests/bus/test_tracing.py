# SPDX-License-Identifier: Apache-2.0
"""One trace per command, from the agent's intent to the chunks; spans in a file; and nothing at all when it is off."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semkv.bus import codec, connect, tracing
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.trace_file import documents
from semkv.bus.tracing import NullTracer, TraceContext, Tracer, extract, inject, setup_tracing
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN, SAMPLES

CMD = "semkv.v1.{tenant}.{domain}.cmd.{instance}"


class Recorder:
    """A tracer whose spans can be looked at."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource.create({"service.name": "test"}))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = Tracer(provider)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def tree(spans: list[ReadableSpan]) -> dict[str, Any]:
    """Names by parenthood, each with its kind."""
    by_id = {span.context.span_id: span for span in spans}  # type: ignore[union-attr]
    children: dict[int | None, list[ReadableSpan]] = {}
    for span in sorted(spans, key=lambda s: (s.start_time or 0, s.name)):
        parent = span.parent.span_id if span.parent is not None and span.parent.span_id in by_id else None
        children.setdefault(parent, []).append(span)

    def below(key: int | None) -> dict[str, Any]:
        return {f"{s.name} {s.kind.name}": below(s.context.span_id) for s in children.get(key, [])}  # type: ignore[union-attr]

    return below(None)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def rank(nats_server: EmbeddedServer, recorder: Recorder) -> Iterator[StandInStorage]:
    ops = StandInStorage(disk=range(10))
    who = RankIdentity("engine-0", 0, 1, Role.STORAGE, DOMAIN)
    worker = RankWorker(BusSettings(url=nats_server.url), who, ops, tracer=recorder.tracer)
    worker.start()
    assert worker.wait_ready(30)
    yield ops
    worker.stop(5)


async def settled(recorder: Recorder, count: int) -> list[ReadableSpan]:
    while len(recorder.exporter.get_finished_spans()) < count:  # noqa: ASYNC110 - spans end just after the result
        await asyncio.sleep(0.01)
    return list(recorder.exporter.get_finished_spans())


@pytest.mark.parametrize(("op", "step"), [("prefetch", "kv.tier.load disk→cpu"), ("evict", "kv.tier.evict")])
async def test_a_command_is_one_trace(
    nats_server: EmbeddedServer, rank: StandInStorage, recorder: Recorder, op: str, step: str
) -> None:
    async with connect(nats_server.url, tracer=recorder.tracer) as kv:
        with recorder.tracer.span("memory.search") as root:
            assert root.context is not None
            handle = await getattr(kv, op)([1, 2], session="s", traceparent=root.context.traceparent)
            outcome = await handle.result(30)
    spans = await settled(recorder, 6)
    assert tree(spans) == {
        "memory.search INTERNAL": {
            f"publish {CMD}.{op} PRODUCER": {
                "queue INTERNAL": {},
                f"process {CMD}.{op} CONSUMER": {f"{step} INTERNAL": {}, "publish result PRODUCER": {}},
            }
        }
    }
    named = recorder.spans()
    process, publish = named[f"process {CMD}.{op}"], named[f"publish {CMD}.{op}"]
    assert [link.context.span_id for link in process.links] == [publish.context.span_id]  # type: ignore[union-attr]
    assert outcome.results[0].trace_id == f"{publish.context.trace_id:032x}"  # type: ignore[union-attr]
    attributes = dict(process.attributes or {})
    assert attributes["messaging.system"] == "nats"
    assert attributes["messaging.operation.name"] == "process"
    assert attributes["kv.command_id"] == handle.command_id
    assert attributes["kv.session_id"] == "s"
    assert attributes["kv.outcome"] == "succeeded"
    assert attributes["kv.chunks.requested"] == 2
    assert not any(isinstance(value, (list, tuple)) for span in spans for value in (span.attributes or {}).values())
    queue = named["queue"]
    assert (queue.end_time or 0) == (process.start_time or 1)


async def test_a_rank_without_a_callers_trace_starts_its_own(
    nats_server: EmbeddedServer, rank: StandInStorage, recorder: Recorder
) -> None:
    async with connect(nats_server.url, tracer=NullTracer()) as kv:
        outcome = await (await kv.prefetch([1])).result(30)
    spans = await settled(recorder, 3)
    assert list(tree(spans)) == [f"process {CMD}.prefetch CONSUMER"]
    assert outcome.results[0].trace_id == f"{spans[0].context.trace_id:032x}"  # type: ignore[union-attr]


async def test_a_rejected_or_failed_command_is_told_apart(
    nats_server: EmbeddedServer, rank: StandInStorage, recorder: Recorder
) -> None:
    async with connect(nats_server.url, tracer=NullTracer()) as kv:
        await (await kv.prefetch([1], order="odd")).result(30)
        rank.fail_with = RuntimeError("x")
        await (await kv.prefetch([1])).result(30)
    spans = [s for s in await settled(recorder, 4) if s.name.startswith("process")]
    outcomes = {(s.attributes or {})["kv.outcome"]: s.status.status_code.name for s in spans}
    assert outcomes == {"rejected": "UNSET", "failed": "ERROR"}


async def test_a_follower_of_events_starts_a_trace_of_its_own_with_a_link(
    nats_server: EmbeddedServer, recorder: Recorder
) -> None:
    event = next(m for m in SAMPLES if isinstance(m, Finished)).model_copy(update={"tenant": "default"})
    async with connect(nats_server.url, tracer=recorder.tracer) as kv:
        stream = kv.finished()
        nc = await nats.connect(nats_server.url)
        payload, headers = codec.encode(event)
        with recorder.tracer.span("kv.finished") as engine:
            inject(headers, engine.context)
            await nc.jetstream().publish(codec.subject_of(event), payload, headers=headers)
        await anext(stream)
        assert stream.context == engine.context
        await stream.close()
        await nc.close()
    process = recorder.spans()["process semkv.v1.{tenant}.{domain}.evt.{instance}.finished"]
    assert process.parent is None
    assert engine.context is not None
    assert [f"{link.context.span_id:016x}" for link in process.links] == [engine.context.span_id]


async def test_a_fan_out_is_one_trace_for_each_follower(nats_server: EmbeddedServer, recorder: Recorder) -> None:
    event = next(m for m in SAMPLES if isinstance(m, Finished)).model_copy(update={"tenant": "default"})
    async with (
        connect(nats_server.url, tracer=recorder.tracer) as kv,
        connect(nats_server.url, tracer=recorder.tracer) as other,
    ):
        streams = [kv.finished(), other.finished()]
        nc = await nats.connect(nats_server.url)
        payload, headers = codec.encode(event)
        with recorder.tracer.span("kv.finished") as engine:
            inject(headers, engine.context)
            await nc.jetstream().publish(codec.subject_of(event), payload, headers=headers)
        for stream in streams:
            await anext(stream)
            await stream.close()
        await nc.close()
    assert engine.context is not None
    spans = [span for span in recorder.exporter.get_finished_spans() if span.name.startswith("process")]
    assert len({span.context.trace_id for span in spans}) == 2  # type: ignore[union-attr]
    for span in spans:
        assert span.parent is None
        assert f"{span.context.trace_id:032x}" != engine.context.trace_id  # type: ignore[union-attr]
        assert [f"{link.context.span_id:016x}" for link in span.links] == [engine.context.span_id]


async def test_off_passes_the_context_on(nats_server: EmbeddedServer) -> None:
    ops = StandInStorage(disk=range(10))
    who = RankIdentity("engine-0", 0, 1, Role.STORAGE, DOMAIN)
    worker = RankWorker(BusSettings(url=nats_server.url), who, ops, tracer=NullTracer())
    worker.start()
    assert worker.wait_ready(30)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with connect(nats_server.url, tracer=NullTracer()) as kv:
        outcome = await (await kv.prefetch([1], traceparent=parent)).result(30)
    assert outcome.results[0].trace_id == parent[3:35]
    await asyncio.to_thread(worker.stop, 5)


def test_off_imports_no_opentelemetry() -> None:
    code = (
        "import sys\n"
        "from semkv.bus import connect, codec\n"
        "from semkv.bus.tracing import NullTracer, setup_tracing, ambient_tracer\n"
        "import semkv.consumers.rank.commands\n"
        "assert type(setup_tracing('x')) is NullTracer and type(ambient_tracer('x')) is NullTracer\n"
        "bad = [m for m in sys.modules if m.split('.')[0] == 'opentelemetry']\n"
        "assert not bad, bad\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "SEMKV_TRACE"))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_off_makes_nothing() -> None:
    tracer = NullTracer()
    context = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    assert tracer.start("x", parent=context).otel is None
    assert tracer.record("x", 1, 2, parent=context) is context
    headers: dict[str, str] = {}
    inject(headers, None)
    assert headers == {}


def test_the_file_is_one_json_object_at_any_time_and_shared_by_processes(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    tracers = [setup_tracing(f"service-{n}", file=file) for n in range(2)]
    for number in range(3):
        for tracer in tracers:
            root = tracer.record(
                f"root-{number}", 1_000, 9_000, kind=tracing.PRODUCER, attributes={"kv.bytes": 5, "b": True}
            )
            tracer.record("child", 2_000, 3_000, parent=root, links=[root] if root else [])
            tracer.flush()
            document = json.loads(file.read_text())
            assert set(document) == {"resourceSpans"}
    (document,) = documents(file.read_text())
    resources = document["resourceSpans"]
    named = {a["value"]["stringValue"] for r in resources for a in r["resource"]["attributes"] if "name" in a["key"]}
    assert {"service-0", "service-1"} <= named
    spans = [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]
    assert len(spans) == 12
    child = next(span for span in spans if span["name"] == "child")
    root_span = next(span for span in spans if span["spanId"] == child["parentSpanId"])
    assert root_span["name"] == "root-0"
    assert root_span["kind"] == 4
    assert (root_span["startTimeUnixNano"], root_span["endTimeUnixNano"]) == ("1000", "9000")
    assert {"key": "kv.bytes", "value": {"intValue": "5"}} in root_span["attributes"]
    assert {"key": "b", "value": {"boolValue": True}} in root_span["attributes"]
    assert child["links"][0]["spanId"] == root_span["spanId"]
    for tracer in tracers:
        tracer.shutdown()


def test_processes_with_one_seed_give_different_ids(tmp_path: Path) -> None:
    contexts = []
    for number in range(2):
        random.seed(0)  # what vLLM does in each of its processes
        tracer = setup_tracing("rank", file=tmp_path / f"{number}.json")
        contexts.append(tracer.record("a", 1_000, 2_000))
        tracer.shutdown()
    first, second = contexts
    assert first is not None and second is not None
    assert first.trace_id != second.trace_id and first.span_id != second.span_id


def test_the_printer_of_traces_reads_the_file(tmp_path: Path) -> None:
    store = pytest.importorskip("semkv.cli.traces.store")
    tracer = setup_tracing("one", file=tmp_path / "t.json")
    tracer.record("a", 1_000, 2_000)
    tracer.shutdown()
    assert [span.name for span in store.read_spans(tmp_path / "t.json")] == ["a"]


def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine, and long enough to hold a head and a tail\n")
    tracer = setup_tracing("x", file=file)
    tracer.record("a", 1, 2)
    tracer.shutdown()
    assert file.read_text().startswith("mine")
    assert "resourceSpans" not in file.read_text()


@given(st.text(max_size=80))
def test_any_traceparent_is_read_exactly_or_ignored(text: str) -> None:
    context = extract({"traceparent": text})
    if context is not None:
        assert context.traceparent == text
        assert len(context.trace_id) == 32


@pytest.mark.parametrize(
    "bad",
    ["", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", "01-x",
     "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"],
)  # fmt: skip
def test_invalid_contexts_are_ignored(bad: str) -> None:
    assert extract({"traceparent": bad}) is None
