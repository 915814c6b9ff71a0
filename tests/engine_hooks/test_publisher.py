# SPDX-License-Identifier: Apache-2.0
"""The event publisher against a real nats-server: nothing lost that fits, every loss seen, nothing that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from semkv.bus.connection import connect_nats
from semkv.bus.domain import HashDomain
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import AuthError
from semkv.bus.settings import BusSettings
from semkv.bus.status import HashesStatus
from semkv.bus.streams import ensure_streams
from semkv.engine_hooks import event_loop
from semkv.engine_hooks.agreement import Agreement
from semkv.engine_hooks.event_loop import EventLoop
from semkv.engine_hooks.finished import FinishedNote
from semkv.engine_hooks.publisher import EventPublisher
from tests.engine_hooks.capture import Capture, stored_events


def domain(**changes: Any) -> HashDomain:
    values: dict[str, Any] = {
        "model": "m",
        "revision": "",
        "chunk_size": 16,
        "save_unfull_chunk": False,
        "kv_dtype": "float32",
        "world_size": 1,
        "layout": "",
        "probe": -5,
        **changes,
    }
    return HashDomain(**values)


def note(number: int = 0, *, texts: tuple[str, ...] = ("-1", "ff"), tenant: str = "default") -> FinishedNote:
    made = FinishedNote()
    made.tenant = tenant
    made.engine_request_id = f"cmpl-{number}-0-0123abcd"
    made.finish_reason = "length"
    made.status = HashesStatus.KNOWN
    made.texts = texts
    made.prompt_tokens = 40
    made.arrived_at = made.finished_at = time.time_ns()
    return made


def publisher(url: str, *, agreement: Agreement | None = None, ring: int = 8192) -> EventPublisher:
    loop = EventLoop(BusSettings(url=url), instance="e", domain="d" * 12, chunk_size=16, agreement=agreement)
    return EventPublisher(loop.run, ring=ring)


def crash_twice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the publisher's thread die of its first two messages; how often it did."""

    class Crash(BaseException):
        """Not even an Exception."""

    real, crashes = event_loop.finished.messages, []

    def messages(*args: Any, **kwargs: Any) -> Any:
        if len(crashes) < 2:
            crashes.append(1)
            raise Crash("on purpose")
        return real(*args, **kwargs)

    monkeypatch.setattr(event_loop.finished, "messages", messages)
    return crashes


@contextlib.contextmanager
def running(made: EventPublisher) -> Iterator[EventPublisher]:
    made.start()
    try:
        yield made
    finally:
        made.close(2.0)
        assert not made.alive


def wait_until(condition: Any, timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_events_come_in_order_with_their_fields(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url)) as made:
        for number in range(1000):
            made.offer(note(number))
        events = seen.wait_for(seen.events, 1000, 20)
        assert [event.seq for event in events] == list(range(1, 1001))
        assert [event.request_id for event in events] == [f"cmpl-{number}" for number in range(1000)]
        assert {event.epoch for event in events} == {made.epoch}
        assert events[0].chunk_hashes == (-1, 255) and events[0].parts == 1
        assert seen.raw[0][0] == f"semkv.v1.default.{'d' * 12}.evt.e.finished"
        beat = seen.wait_for(lambda: [b for b in seen.heartbeats() if b.last_seq == 1000], 1, 10)[0]
        assert beat.epoch == made.epoch


def test_overflow_drops_the_oldest_and_leaves_a_gap(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened = threading.Event()

    async def after_the_listener(*args: Any, **kwargs: Any) -> Any:
        connection = await connect_nats(*args, **kwargs)
        while not listened.is_set():  # noqa: ASYNC110  # another thread sets it
            await asyncio.sleep(0.01)
        return connection

    monkeypatch.setattr(event_loop, "connect_nats", after_the_listener)
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    url = server.url
    server.stop()
    with running(publisher(url, ring=10)) as made:
        for number in range(25):
            made.offer(note(number))
        assert made.backlog() == 10
        server.start()
        try:
            with Capture(url) as seen:
                listened.set()
                wait_until(lambda: len(seen.events()) == 10)
                events = seen.events()
                assert [event.seq for event in events] == list(range(16, 26))
                made.offer(note(25))
                assert seen.wait_for(seen.events, 11, 10)[-1].seq == 26
                assert made.dropped == 15
                lines = [r.getMessage() for r in caplog.records if "were dropped" in r.getMessage()]
                assert len(lines) == 1 and "15 finished events" in lines[0]
        finally:
            server.stop()


def test_an_engine_started_before_nats_publishes_once_it_is_up(tmp_path: Any) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    server.stop()
    with running(publisher(server.url)) as made:
        made.offer(note(1))
        time.sleep(1.5)
        assert made.alive and made.backlog() == 1
        server.start()
        try:
            with Capture(server.url) as seen:
                made.offer(note(2))
                events = seen.wait_for(seen.events, 1, 15)
                assert events[-1].seq in (1, 2)
                wait_until(lambda: made.published == 2)
        finally:
            server.stop()


def test_nothing_is_lost_while_nats_is_restarted(nats_server: EmbeddedServer) -> None:
    """Every event that fits the ring arrives at the stream; a repeated one has the seq it had."""
    stop = threading.Event()
    with running(publisher(nats_server.url)) as made:
        wait_until(lambda: _offer_and_count(made) and made.published > 0)

        def offer() -> None:
            while not stop.is_set():
                made.offer(note())
                time.sleep(0.002)

        thread = threading.Thread(target=offer)
        asyncio.run(_ensure(nats_server.url))
        thread.start()
        for _ in range(3):
            time.sleep(0.7)
            nats_server.kill()
            time.sleep(0.7)
            nats_server.start()
        time.sleep(1.0)
        stop.set()
        thread.join()
        total = made.last_seqs()["default"]
        wait_until(lambda: made.published >= total and not made.backlog(), 30)
        time.sleep(3.0)
    events = [event.seq for event in stored_events(nats_server.url)]
    seen_seqs = set(events)
    assert len(events) == len(seen_seqs), "what was sent twice is stored once"
    first = min(seen_seqs)
    lost = set(range(first, total + 1)) - seen_seqs
    assert not lost, f"{len(lost)} of {total} lost"


def _offer_and_count(made: EventPublisher) -> bool:
    if not made.last_seqs():
        made.offer(note())
    return True


async def _ensure(url: str) -> None:
    connection = await connect_nats(BusSettings(url=url), name="test")
    await ensure_streams(connection, BusSettings(url=url))
    await connection.close()


def test_close_publishes_what_is_left_within_a_second(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen:
        made = publisher(nats_server.url)
        made.start()
        made.offer(note())
        seen.wait_for(seen.events, 1, 10)
        for number in range(500):
            made.offer(note(number))
        begin = time.monotonic()
        made.close(1.0)
        assert time.monotonic() - begin < 2.0
        assert not made.alive
        assert len(seen.wait_for(seen.events, 501, 5)) == 501
        made.close(1.0)


def test_close_without_nats_ends_in_time(tmp_path: Any) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    server.stop()
    made = publisher(server.url)
    made.start()
    made.offer(note())
    time.sleep(0.3)
    begin = time.monotonic()
    made.close(1.0)
    assert time.monotonic() - begin < 2.0
    made.offer(note())  # afterwards too, nothing is raised


def test_a_crash_of_the_thread_never_reaches_the_engine(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_twice(monkeypatch)
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url)) as made:
        made.offer(note(1))
        (event,) = seen.wait_for(seen.events, 1, 20)
        assert event.seq == 1 and made.restarts == 2


def test_an_event_that_cannot_be_written_does_not_hold_up_others(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url)) as made:
        bad = note(1, texts=("not hex",))
        made.offer(bad)
        made.offer(note(2))
        (event,) = seen.wait_for(seen.events, 1, 10)
        assert event.seq == 2


def test_a_dead_thread_is_started_again(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen:
        made = publisher(nats_server.url)
        made.start()
        made.offer(note(1))
        seen.wait_for(seen.events, 1, 10)
        first = made._thread
        made._runner, runner = _ends, made._runner
        assert first is not None and made._loop is not None
        made._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(_cancel_others()))
        first.join(10)
        assert not first.is_alive()
        made._runner = runner
        made._asleep = True
        made.offer(note(2))
        assert seen.wait_for(seen.events, 2, 10)[-1].seq == 2
        made.close(1.0)


async def _ends(_publisher: EventPublisher) -> None:
    return


async def _cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def test_large_events_are_split(tmp_path: Any) -> None:
    with (
        EmbeddedServer(tmp_path / "nats", config="max_payload: 32768\n") as server,
        Capture(server.url) as seen,
        running(publisher(server.url)) as made,
    ):
        texts = tuple(f"{value:x}" for value in range(-5000, 5000))
        made.offer(note(1, texts=texts))
        made.offer(note(2))
        events = seen.wait_for(lambda: [e for e in seen.events() if e.request_id == "cmpl-1"], 4, 10)
        assert [event.part for event in events] == [1, 2, 3, 4] and {event.parts for event in events} == {4}
        assert [value for event in events for value in event.chunk_hashes] == list(range(-5000, 5000))
        assert len({event.seq for event in events}) == 1
        seen.finished("cmpl-2")


def test_tenants_have_their_own_sequence(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url)) as made:
        for number in range(4):
            made.offer(note(number, tenant="a" if number % 2 else "b"))
        events = seen.wait_for(seen.events, 4, 10)
        assert sorted((event.tenant, event.seq) for event in events) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_tenants_are_bounded(nats_server: EmbeddedServer) -> None:
    made = publisher(nats_server.url)
    for number in range(6000):
        made.offer(note(number, tenant=f"t{number}"))
    assert len(made.last_seqs()) <= 4097


def _child(made: EventPublisher, pipe: Any) -> None:
    made.offer(note(99))
    deadline = time.monotonic() + 15
    while made.published < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    pipe.send((made.epoch, made.published, os.getpid()))
    made.close(1.0)
    os._exit(0)


def test_a_forked_child_publishes_by_itself(nats_server: EmbeddedServer) -> None:
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url)) as made:
        made.offer(note(1))
        seen.finished("cmpl-1")
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_child, args=(made, theirs))
        process.start()
        assert ours.poll(20)
        epoch, published, _pid = ours.recv()
        process.join(10)
        assert published == 1 and epoch != made.epoch
        (event,) = seen.finished("cmpl-99")
        assert event.epoch == epoch and event.seq == 1
        made.offer(note(2))
        assert seen.finished("cmpl-2")[0].seq == 2


def test_refused_credentials_are_said_once_and_tried_again(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    async def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            return await connect_nats(*args, **kwargs)
        except AuthError:
            refused.append(1)
            raise

    async def briefly(self: EventPublisher, seconds: float) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(event_loop, "connect_nats", counted)
    monkeypatch.setattr(EventPublisher, "pause", briefly)
    with (
        EmbeddedServer(tmp_path / "nats", config='authorization { user: "u", password: "p" }\n') as server,
        running(publisher(server.url)) as made,
    ):
        made.offer(note(1))
        wait_until(lambda: len(refused) >= 3)
        assert made.alive and made.backlog() == 1 and made.restarts == 0
    assert len([r for r in caplog.records if "event publisher, connecting: AuthError" in r.getMessage()]) == 1
