# SPDX-License-Identifier: Apache-2.0
"""What runs on the scheduler's thread for a request, and what does not: told by the calls made, not by their times."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

from semkv.bus.connection import connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages.base import TenantMessage
from semkv.bus.settings import BusSettings
from semkv.engine_hooks import event_loop
from semkv.engine_hooks.event_loop import EventLoop
from semkv.engine_hooks.lookup_client import TRACE_LABEL, HashRecords, upgrade
from semkv.engine_hooks.publisher import EventPublisher
from semkv.engine_hooks.scheduler_side import SchedulerSide
from semkv.engine_hooks.settings import HookSettings
from tests.engine_hooks.clients import lookup_client
from tests.engine_hooks.test_publisher import note, publisher, wait_until
from tests.engine_hooks.test_scheduler_side import ended, request

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ELSEWHERE = ("opentelemetry", "semkv.bus.tracing", "semkv.bus.codec", "semkv.bus.messages", "nats", "pydantic")
"""Spans, messages and their packing, and the connection belong to the publisher's thread."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where no NATS answers."""
    with EmbeddedServer(tmp_path / "nats") as server:
        return server.url


@pytest.fixture
def calls(url: str) -> Iterator[Callable[[dict[str, Any] | None], set[str]]]:
    """Gives a function that serves one request and says which functions ran for it on this thread."""
    made = publisher(url)
    made.start()
    try:
        with lookup_client() as client:
            upgrade(client, HashRecords())
            impl = SimpleNamespace(lookup_client=client, _request_trackers={}, config=SimpleNamespace(chunk_size=16))
            side = SchedulerSide(HookSettings(), impl, made, agreement=None)
            yield lambda said: _watched(side, client, request(tokens=400, params=said))
    finally:
        made.close(1.0)


def _watched(side: SchedulerSide, client: Any, one: Any) -> set[str]:
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            seen.add(f"{argument.__module__}.{argument.__qualname__}")

    sys.setprofile(watch)
    try:
        side.before_lookup(one)
        client.lookup(list(one.prompt_token_ids), one.request_id)
        side.after_lookup(one, 0, (0, False))
        answer = side.finished(ended(one), side.before_finished(one), (False, None))
    finally:
        sys.setprofile(None)
    assert answer[1] is not None and len(answer[1]["chunk_hashes"]) == 25
    assert side.failures == 0
    assert "semkv.engine_hooks.publisher.offer" in seen, "this test needs to see the calls"
    return seen


@pytest.mark.parametrize("tracing", [False, True])
def test_no_span_and_no_message_is_made_on_the_schedulers_thread(
    tracing: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if tracing:
        monkeypatch.setenv("SEMKV_TRACE_FILE", str(tmp_path / "trace.json"))
    else:
        monkeypatch.delenv("SEMKV_TRACE_FILE", raising=False)
    calls = request.getfixturevalue("calls")
    for said in (None, {"semkv": {"session": "s", "traceparent": TRACE}}):
        assert sorted(name for name in calls(said) if name.startswith(ELSEWHERE)) == []


def test_tracing_that_is_off_adds_no_call(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, url: str, tmp_path: Path
) -> None:
    """A traced request costs, beside the reading of what it says, no more than one that says nothing of a trace."""
    monkeypatch.delenv("SEMKV_TRACE_FILE", raising=False)
    calls = request.getfixturevalue("calls")
    calls(None)
    untraced = calls({"semkv": {"session": "s"}})
    traced = calls({"semkv": {"session": "s", "traceparent": TRACE}})
    assert {name for name in traced - untraced if not name.startswith("semkv.engine_hooks.request_labels.")} <= {
        "None.Pattern.match",
        "builtins.Pattern.match",
        "re.Pattern.match",
    }


@pytest.mark.parametrize("tracing", [False, True])
def test_the_ranks_hear_of_a_trace_only_where_spans_go_somewhere(
    tracing: bool, monkeypatch: pytest.MonkeyPatch, url: str, tmp_path: Path
) -> None:
    monkeypatch.delenv("SEMKV_TRACE_FILE", raising=False)
    if tracing:
        monkeypatch.setenv("SEMKV_TRACE_FILE", str(tmp_path / "trace.json"))
    with lookup_client() as client:
        upgrade(client, HashRecords())
        impl = SimpleNamespace(lookup_client=client, config=SimpleNamespace(chunk_size=16))
        side = SchedulerSide(HookSettings(), impl, publisher(url), agreement=None)
        side.before_lookup(request(params={"semkv": {"traceparent": TRACE}}))
        assert side.records is not None
        assert list(side.records.labels.values()) == ([{TRACE_LABEL: TRACE}] if tracing else [])


class Watched(EventLoop):
    """An event loop that notes what it has sent."""

    def __init__(self, url: str) -> None:
        super().__init__(BusSettings(url=url), instance="e", domain="d" * 12, chunk_size=16, agreement=None)
        self.sent = 0

    async def _put(self, connection: Any, message: TenantMessage, context: Any = None) -> None:
        self.sent += message.type == "finished"
        await super()._put(connection, message, context)


@pytest.mark.parametrize(("patience_s", "wanted"), [(0.0, set(range(1, 20))), (3600.0, set())])
async def test_others_have_their_turn_between_events(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, patience_s: float, wanted: set[int]
) -> None:
    """The publisher lets go of the interpreter within a batch, when it has had it for long enough."""
    assert event_loop.YIELD_S < 0.001, "the interpreter itself would take 5 ms"
    monkeypatch.setattr(event_loop, "YIELD_S", patience_s)
    loop = Watched(nats_server.url)
    made = EventPublisher(loop.run)
    made._closing = True  # no thread: the batch is published here
    for number in range(20):
        made.offer(note(number, texts=("ff",) * 512))
    seen: set[int] = set()

    async def other() -> None:
        while True:
            seen.add(loop.sent)
            await asyncio.sleep(0)

    connection = await connect_nats(BusSettings(url=nats_server.url), name="test")
    task = asyncio.create_task(other())
    try:
        assert await loop._publish(connection, made)
    finally:
        task.cancel()
        await connection.close()
    assert {number for number in seen if 0 < number < 20} == wanted


def test_what_is_left_is_published_when_the_process_ends(nats_server: EmbeddedServer) -> None:
    """Nobody closes it: the end of the interpreter does."""
    import multiprocessing

    from tests.engine_hooks.capture import Capture

    with Capture(nats_server.url) as seen:
        process = multiprocessing.get_context("fork").Process(target=_offer_and_leave, args=(nats_server.url,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert len(seen.wait_for(seen.events, 501, 5)) == 501


def _offer_and_leave(url: str) -> None:
    made = publisher(url)
    made.offer(note())
    wait_until(lambda: made.published == 1)
    for number in range(500):
        made.offer(note(number))
