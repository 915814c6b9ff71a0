# SPDX-License-Identifier: Apache-2.0
"""The client's other side: event streams, the blocking twin, and clear failures at connect."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from semkv.bus import codec, connect, connect_blocking
from semkv.bus.client.gaps import Gap, GapDetector
from semkv.bus.connection import Link, check_size, connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import (
    AuthError,
    BusError,
    MessageTooLargeError,
    NoJetStreamError,
    PermissionDeniedError,
    ServerTooOldError,
)
from semkv.bus.messages import Finished, Heartbeat
from semkv.bus.reader import OrderedReader
from semkv.bus.settings import BusSettings, SettingsError
from semkv.bus.status import Role
from semkv.bus.streams import EVENTS, ensure_streams
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN, SAMPLES

SAMPLE = next(m for m in SAMPLES if isinstance(m, Finished))


def event(seq: int, **changes: object) -> Finished:
    fields = {"tenant": "default", "seq": seq, "request_id": f"r{seq}", "engine_request_id": f"r{seq}-0", **changes}
    return SAMPLE.model_copy(update=fields)


@pytest.fixture
async def nc(nats_server: EmbeddedServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url)
    await ensure_streams(client, BusSettings(url=nats_server.url))
    yield client
    await client.close()


async def publish(nc: Client, *messages: Finished | Heartbeat) -> None:
    for message in messages:
        payload, headers = codec.encode(message)
        await nc.jetstream().publish(codec.subject_of(message), payload, headers=headers)


async def test_events_come_in_order_and_none_after_the_call_is_missed(nats_server: EmbeddedServer, nc: Client) -> None:
    async with connect(nats_server.url) as kv:
        await publish(nc, event(1))
        stream = kv.finished()
        await publish(nc, event(2), event(3, session="other"))
        seqs = [(await anext(stream)).seq]
        while seqs[-1] != 3:
            seqs.append((await anext(stream)).seq)
        assert seqs[-2:] == [2, 3]  # one from just before the call may come too: clocks are only known that well
        only = kv.finished(session="other", since_ns=0)
        assert (await anext(only)).seq == 3
        await stream.close()
        await only.close()


async def test_resume_goes_on_after_a_sequence_and_replay_starts_over(nats_server: EmbeddedServer, nc: Client) -> None:
    await publish(nc, *(event(seq) for seq in range(1, 6)))
    async with connect(nats_server.url) as kv:
        stream = kv.finished(since_ns=0)
        for _ in range(3):
            await anext(stream)
        position = stream.last_seq
        await stream.close()
        resumed = kv.finished(after=position)
        assert [(await anext(resumed)).seq for _ in range(2)] == [4, 5]
        replay = kv.finished(since_ns=0)
        assert [(await anext(replay)).seq for _ in range(5)] == [1, 2, 3, 4, 5]
        await resumed.close()
        await replay.close()


async def test_a_gap_is_told_and_repetitions_are_dropped(nats_server: EmbeddedServer, nc: Client) -> None:
    told: list[Gap] = []
    async with connect(nats_server.url) as kv:
        stream = kv.finished(on_gap=told.append)
        await publish(nc, event(1), event(2), event(2), event(5), event(4), event(6))
        assert [(await anext(stream)).seq for _ in range(4)] == [1, 2, 5, 6]
        assert told == [Gap("engine-0", SAMPLE.epoch, 3, 4)]
        await stream.close()


def test_a_tail_loss_is_a_gap_at_the_second_heartbeat() -> None:
    gaps = GapDetector()
    assert gaps.event("i", 1, 1, 1) == (True, None)
    assert gaps.heartbeat("i", 1, 3) is None  # 2 and 3 may be on their way
    assert gaps.event("i", 1, 2, 1) == (True, None)
    assert gaps.heartbeat("i", 1, 3) == Gap("i", 1, 3, 3)
    assert gaps.heartbeat("i", 1, 3) is None
    assert gaps.event("i", 1, 4, 1) == (True, None)
    assert gaps.event("i", 2, 2, 1) == (True, Gap("i", 2, 1, 1))  # a new process counts from 1
    assert gaps.event("i", 1, 5, 1) == (False, None)  # late words of the old one


def test_an_event_that_did_not_come_whole_is_a_gap() -> None:
    gaps = GapDetector()
    assert gaps.event("i", 1, 1, 2, 3) == (True, None)  # begun in its middle: what was before is not judged
    assert gaps.event("i", 1, 1, 3, 3) == (True, None)
    assert gaps.event("i", 1, 2, 1, 3) == (True, None)
    assert gaps.event("i", 1, 2, 3, 3) == (True, None)
    assert gaps.event("i", 1, 3, 1, 1) == (True, Gap("i", 1, 2, 2))  # its second part never came
    assert gaps.event("i", 1, 4, 2, 2) == (True, None)
    assert gaps.event("i", 1, 6, 1, 2) == (True, Gap("i", 1, 4, 5))
    assert gaps.heartbeat("i", 1, 6) is None  # the rest may be on its way
    assert gaps.heartbeat("i", 1, 6) == Gap("i", 1, 6, 6)
    assert gaps.event("i", 1, 6, 2, 2) == (False, None)
    assert gaps.event("i", 1, 7, 1, 2) == (True, None)
    assert gaps.event("i", 1, 7, 2, 2) == (True, None)
    assert gaps.heartbeat("i", 1, 7) is None
    assert gaps.heartbeat("i", 1, 7) is None


async def test_parts_are_put_together(nats_server: EmbeddedServer, nc: Client) -> None:
    async with connect(nats_server.url) as kv:
        stream = kv.finished()
        first = event(1, part=1, parts=2, chunk_hashes=(1, 2))
        await publish(nc, first, first.model_copy(update={"part": 2, "chunk_hashes": (3,)}), event(2))
        whole = await anext(stream)
        assert (whole.chunk_hashes, whole.parts) == ((1, 2, 3), 1)
        assert (await anext(stream)).seq == 2
        assert not stream.gaps
        await stream.close()


async def test_a_stream_goes_on_over_a_server_crash(nats_server: EmbeddedServer, nc: Client) -> None:
    async with connect(nats_server.url) as kv:
        stream = kv.finished()
        await publish(nc, event(1))
        assert (await anext(stream)).seq == 1
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        while True:
            try:
                await publish(nc, event(2))
                break
            except nats.errors.Error:
                await asyncio.sleep(0.05)
        assert (await anext(stream)).seq == 2
        await stream.close()


async def test_a_slow_reader_is_waited_for_and_loses_nothing(nats_server: EmbeddedServer, nc: Client) -> None:
    """The server is held back by flow control: far less than everything is on this side while nobody reads."""
    count, size = 400, 100_000
    for _ in range(count):
        await nc.jetstream().publish("semkv.v1.t.d.evt.i.finished", b"x" * size)
    link = Link()
    mine = await connect_nats(BusSettings(url=nats_server.url), name="slow", link=link)
    async with OrderedReader(mine, link, EVENTS, ["semkv.v1.t.>"], start_seq=1) as reader:
        await reader.ready()
        await asyncio.sleep(1.5)
        assert mine.stats["in_bytes"] < count * size
        seqs = [(await anext(reader)).seq for _ in range(count)]
        assert seqs == list(range(1, count + 1))
    await mine.close()


def test_the_blocking_twin(nats_server: EmbeddedServer) -> None:
    ops = StandInStorage(disk=range(10))
    worker = RankWorker(BusSettings(url=nats_server.url), RankIdentity("e", 0, 1, Role.STORAGE, DOMAIN), ops)
    worker.start()
    assert worker.wait_ready(30)
    with connect_blocking(nats_server.url) as kv:
        stream = kv.finished()
        assert [info.instance for info in kv.engines()] == ["e"]
        handle = kv.prefetch([1, 2])
        assert len(handle.accepted(30)) == 1
        assert handle.result(30).ok
        assert kv.locate([1]).result(30).results[0].chunk_tiers == (("cpu", "disk"),)
        assert kv.retain("s", [1]).result(30).ok
        assert kv.release("s").result(30).ok
        assert kv.evict([1]).result(30).ok
        assert kv.cancel(handle).result(30).state == "rejected"
        assert stream.next(timeout=0.2) is None

        async def send() -> None:
            nc = await nats.connect(nats_server.url)
            await publish(nc, event(1))
            await nc.close()

        asyncio.run(send())
        assert next(stream).seq == 1
        stream.close()
    worker.stop(5)


def test_a_blocking_call_that_waits_when_the_client_is_closed_ends(nats_server: EmbeddedServer) -> None:
    kv = connect_blocking(nats_server.url)
    stream = kv.finished()
    ends: list[object] = []

    def wait() -> None:
        try:
            ends.append(next(stream, "over"))
        except BusError as error:
            ends.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while stream._asking is None:  # the call is on its way
        time.sleep(0.01)
    kv.close()
    waiting.join(60)
    assert len(ends) == 1
    kv.close()  # again: nothing to do
    for late in (kv.engines, lambda: kv.prefetch([1]), stream.close):
        with pytest.raises(BusError, match="closed"):
            late()


async def test_an_old_server_is_refused_at_connect() -> None:
    """A stand-in that greets as 2.9.10; nothing else of a server is needed."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.9.10","max_payload":1048576,"proto":1,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ServerTooOldError, match=r"2\.9\.10.*2\.11"):
        await connect(f"nats://127.0.0.1:{port}")
    server.close()


async def test_a_server_without_jetstream_is_said_so(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, jetstream=False) as server, pytest.raises(NoJetStreamError, match="-js"):
        await connect(server.url)


AUTH = """
authorization { users: [
  { user: all, password: secret-a }
  { user: looker, password: secret-b, permissions: { publish: { deny: "semkv.v1.*.*.cmd.>" } } }
] }
"""


async def test_wrong_credentials_are_said_at_once_and_never_shown(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", config=AUTH) as server:
        url = server.url.replace("nats://", "nats://all:wrong-secret@")
        started = time.monotonic()
        with pytest.raises(AuthError) as error:
            await connect(url, timeout=60)
        assert time.monotonic() - started < 30  # at once, not when the time-out is over
        assert "wrong-secret" not in str(error.value)
        assert "wrong-secret" not in repr(BusSettings(url=url))


async def test_a_denied_command_is_an_error_at_once(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", config=AUTH) as server:
        rank_url = server.url.replace("nats://", "nats://all:secret-a@")
        worker = RankWorker(BusSettings(url=rank_url), RankIdentity("e", 0, 1, Role.STORAGE, DOMAIN), StandInStorage())
        worker.start()
        assert worker.wait_ready(30)
        password = tmp_path / "password"
        password.write_text("secret-b\n")
        settings = BusSettings(url=server.url, user="looker", password_file=password)
        async with connect(settings=settings) as kv:
            for _ in range(2):
                with pytest.raises(PermissionDeniedError, match="semkv auth"):
                    await kv.prefetch([1])
        worker.stop(5)


@pytest.mark.parametrize("right", ["STREAM.INFO", "CONSUMER.CREATE"])
async def test_an_event_stream_that_is_denied_is_an_error_at_once(tmp_path: Path, right: str) -> None:
    config = AUTH.replace("semkv.v1.*.*.cmd.>", f"$JS.API.{right}.>")
    with EmbeddedServer(tmp_path / "s", config=config) as server:
        async with connect(server.url.replace("nats://", "nats://all:secret-a@")):
            pass  # the streams are there
        async with connect(server.url.replace("nats://", "nats://looker:secret-b@")) as kv:
            with pytest.raises(PermissionDeniedError, match=right):
                await anext(kv.finished())


async def test_a_command_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", config="max_payload: 1500") as server:
        worker = RankWorker(
            BusSettings(url=server.url), RankIdentity("e", 0, 1, Role.STORAGE, DOMAIN), StandInStorage()
        )
        worker.start()
        assert worker.wait_ready(30)
        async with connect(server.url) as kv:
            with pytest.raises(MessageTooLargeError, match="1500"):
                await kv.prefetch([1], session="東" * 256)
            assert (await (await kv.prefetch([1])).result(30)).unanswered == ()
        worker.stop(5)


def test_settings_name_the_variable_and_the_way_out() -> None:
    for env, variable in (
        ({"SEMKV_NATS_URL": "http://x"}, "SEMKV_NATS_URL"),
        ({"SEMKV_REPLICAS": "many"}, "SEMKV_REPLICAS"),
        ({"SEMKV_REPLICAS": "9"}, "SEMKV_REPLICAS"),
        ({"SEMKV_NATS_ACCOUNTS": "maybe"}, "SEMKV_NATS_ACCOUNTS"),
        ({"SEMKV_INSTANCE": "all"}, "SEMKV_INSTANCE"),
        ({"SEMKV_TENANT": "a\nb"}, "SEMKV_TENANT"),
        ({"SEMKV_EVENT_FORMAT": "xml"}, "SEMKV_EVENT_FORMAT"),
        ({"SEMKV_NATS_CERT": "/x"}, "SEMKV_NATS_KEY"),
    ):
        with pytest.raises(SettingsError, match=variable):
            BusSettings.from_env(env)


async def test_what_we_call_the_limit_is_the_servers(tmp_path: Path) -> None:
    """At the limit a message is taken; one byte more is refused here, where the server would end the connection."""
    with EmbeddedServer(tmp_path / "s", config="max_payload: 2048") as server:
        link = Link()
        nc = await connect_nats(BusSettings(url=server.url), name="x", link=link)
        headers = {"Content-Type": "application/msgpack", "Nats-Msg-Id": "a.b"}
        room = 2048 - codec.wire_size(b"", headers)
        check_size(nc, b"x" * room, headers)
        await nc.publish("s", b"x" * room, headers=headers)
        await nc.flush()
        assert link.up
        with pytest.raises(MessageTooLargeError, match="2049"):
            check_size(nc, b"x" * (room + 1), headers)
        await nc.publish("s", b"x" * (room + 1), headers=headers)
        await link.closed.wait()  # what the check keeps us from
