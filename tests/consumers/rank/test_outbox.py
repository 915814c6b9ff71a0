# SPDX-License-Identifier: Apache-2.0
"""A rank's own events: published from any thread, kept while NATS is away, in the trace of their command."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import nats
import pytest

from semkv.bus import KV, codec
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Outcome
from semkv.bus.tracing import TraceContext, setup_tracing
from semkv.cli.traces.store import read_spans
from semkv.consumers.rank import outbox
from semkv.consumers.rank.outbox import CommandTraces, Outbox
from semkv.consumers.storage.ops import Control, OpResult
from tests.consumers.rank.conftest import MakeRank
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN
from tests.engine_hooks.capture import Capture

CONTEXT = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def outcome(number: int) -> Outcome:
    return Outcome(
        tenant="default",
        domain=DOMAIN.fingerprint,
        instance="engine-0",
        command_id=f"c{number}",
        rank=0,
        useful=number,
        wasted=1,
        bytes=10,
        lead_ms=2.5,
    )


def told(seen: Capture) -> list[Outcome]:
    return [message for message in seen.messages if isinstance(message, Outcome)]


def test_outcomes_offered_from_any_thread_are_published(nats_server: EmbeddedServer, make_rank: MakeRank) -> None:
    worker = make_rank(StandInStorage())
    with Capture(nats_server.url) as seen:
        threads = [threading.Thread(target=worker.outbox.offer, args=(outcome(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        seen.wait_for(lambda: told(seen), 4, 15)
    assert sorted(one.command_id for one in told(seen)) == ["c0", "c1", "c2", "c3"]
    assert next(one for one in told(seen) if one.useful == 3) == outcome(3)


async def test_what_is_offered_while_nats_is_away_is_published_later(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    worker = make_rank(StandInStorage())
    await asyncio.to_thread(nats_server.kill)
    for number in range(3):
        worker.outbox.offer(outcome(number))
    await asyncio.to_thread(nats_server.start)
    connection = await nats.connect(nats_server.url)
    try:
        subject = f"semkv.v1.default.{DOMAIN.fingerprint}.evt.engine-0.outcome"
        stream = await connection.jetstream().subscribe(subject, ordered_consumer=True)
        found = [await stream.next_msg(timeout=60) for _ in range(3)]
        decoded = [codec.decode(message.subject, dict(message.headers or {}), message.data) for message in found]
        assert decoded == [outcome(number) for number in range(3)]
    finally:
        await connection.close()


async def test_a_rank_without_a_connection_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LIMIT", 2)
    waiting = Outbox()
    for number in range(5):
        waiting.offer(outcome(number))
    assert waiting.dropped == 3
    sent: list[str] = []

    class Connection:
        """Stands in for a connection that is up."""

        is_connected = True

        async def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
            sent.append(subject)

    await waiting.drain()
    assert sent == []
    waiting.attach(Connection())  # type: ignore[arg-type]
    await waiting.drain()
    await waiting.drain()
    assert len(sent) == 2


async def test_storage_learns_the_commands_name_and_spans_can_be_linked_to(
    make_rank: MakeRank, kv: KV, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    names: list[str] = []
    during: list[TraceContext | None] = []

    class Storage(StandInStorage):
        def prefetch(self, hashes: tuple[int, ...], *, control: Control, **rest: Any) -> OpResult:
            names.append(control.command_id)
            during.append(worker.traces.get(control.command_id))
            return super().prefetch(hashes, control=control, **rest)

    file = tmp_path / "trace.json"
    tracer = setup_tracing("rank", file=file)
    worker = make_rank(Storage(disk=[1, 2]), tracer=tracer)
    connection = await nats.connect(nats_server.url)
    await connection.publish(
        f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.engine-0.prefetch",
        b'{"command_id": "traced", "client": "somebody", "chunk_hashes": ["0000000000000001"]}',
        headers={"traceparent": CONTEXT.traceparent},
    )
    until = time.monotonic() + 20
    while worker.traces.get("default.traced") in (None, CONTEXT) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # another thread's doing
    await connection.close()
    assert names == ["default.traced"]
    assert during == [CONTEXT], "while the command runs, the place it came from"
    context = worker.traces.get("default.traced")
    assert context is not None
    with Capture(nats_server.url) as seen:
        worker.outbox.offer(outcome(1), context)
        await asyncio.to_thread(seen.wait_for, lambda: told(seen), 1, 15)
        (headers,) = [headers for subject, headers, _ in seen.raw if subject.endswith(".outcome")]
    tracer.flush()
    tracer.shutdown()
    spans = read_spans(file)
    process = next(span for span in spans if span.name.startswith("process"))
    published = next(span for span in spans if span.name.endswith("{instance}.outcome"))
    assert (process.trace_id, process.span_id) == (context.trace_id, context.span_id)
    assert (published.trace_id, published.parent_id) == (process.trace_id, process.span_id)
    assert published.attributes["kv.chunks.useful"] == 1 and published.attributes["kv.command_id"] == "c1"
    assert headers["traceparent"].split("-")[2] == published.span_id


def test_traces_are_bounded_and_the_later_place_counts() -> None:
    traces = CommandTraces(limit=2)
    later = TraceContext(CONTEXT.traceparent.replace("b7", "b8"))
    traces.keep("a", CONTEXT)
    traces.keep("a", None)
    traces.keep("a", later)
    assert traces.get("a") == later
    traces.keep("b", CONTEXT)
    traces.keep("c", CONTEXT)
    assert traces.get("a") is None and traces.get("c") == CONTEXT
