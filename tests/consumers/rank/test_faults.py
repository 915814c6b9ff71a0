# SPDX-License-Identifier: Apache-2.0
"""The same promises while things break for real: server crashes, dead links, dying and hanging ranks, skewed clocks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from semkv.bus import KV, codec, connect, registry
from semkv.bus.client.handle import UNANSWERED
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import BusUnavailableError
from semkv.bus.messages import Finished
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role, State
from semkv.bus.streams import COMMANDS
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.bus.fault_proxy import FaultProxy
from tests.consumers.rank.conftest import MakeRank, until_live
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN, SAMPLES

SAMPLES_EVENT = next(m for m in SAMPLES if isinstance(m, Finished))
OUTAGES_S = [0.0, 5.0, *([60.0] if os.environ.get("SEMKV_LONG_TESTS") else [])]


@pytest.mark.parametrize("outage_s", OUTAGES_S)
async def test_a_command_sent_right_after_an_outage_runs(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV, outage_s: float
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    assert (await (await kv.prefetch([1])).result(30)).ok
    await asyncio.to_thread(nats_server.kill)
    await asyncio.sleep(outage_s)
    await asyncio.to_thread(nats_server.start)
    outcome = await (await kv.prefetch([2])).result(60)
    assert outcome.ok
    assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]


async def test_a_command_sent_while_the_server_is_down_runs_when_it_is_back(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    await kv.engines()
    await asyncio.to_thread(nats_server.kill)
    sending = asyncio.create_task(kv.prefetch([3]))
    await asyncio.sleep(0.5)
    assert not sending.done()
    await asyncio.to_thread(nats_server.start)
    assert (await (await sending).result(60)).ok
    assert ops.calls == [("prefetch", (3,))]


async def test_a_result_given_while_the_server_was_down_arrives(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    handle = await kv.prefetch([1])
    await handle.accepted(30)
    await asyncio.to_thread(nats_server.kill)
    ops.gate.set()
    while ops.running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # the result has been made by now, with nobody to tell
    await asyncio.to_thread(nats_server.start)
    assert (await handle.result(60)).ok
    assert len(ops.calls) == 1


async def test_a_server_that_crashes_in_the_middle_of_many_commands_loses_and_repeats_none(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(1000))
    make_rank(ops)
    handles = []
    for number in range(200):
        if number == 100:
            await asyncio.to_thread(nats_server.kill)
            await asyncio.to_thread(nats_server.start)
        handles.append(await kv.prefetch([number]))
    for handle in handles:
        assert (await handle.result(60)).ok
    assert sorted(c[1][0] for c in ops.calls) == list(range(200))


async def test_a_rank_slower_than_the_client_to_reconnect_is_still_known(
    nats_server: EmbeddedServer, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the registry is empty until ranks have reconnected; a client that is quicker must not call it so.

    The same rules on a shorter clock: the outage is longer than the registry's TTL.
    """
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(registry, "GRACE_S", 0.5)
    monkeypatch.setattr(registry, "REGISTRY_TTL_S", 3.0)
    ops = StandInStorage(disk=range(10))
    async with FaultProxy(nats_server.url) as proxy, connect(nats_server.url) as kv:
        worker = await asyncio.to_thread(make_rank, ops, url=proxy.url)
        assert (await (await kv.prefetch([1])).result(30)).ok
        proxy.cut()
        await asyncio.to_thread(nats_server.kill)
        await asyncio.sleep(3.5)
        await asyncio.to_thread(nats_server.start)
        handle = await kv.prefetch([2])  # the client is back; the rank is not
        assert [str(name) for name in handle.expected] == ["engine-0.0"]
        assert not handle.done
        proxy.heal()
        assert (await handle.result(60)).ok
        assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]
        await asyncio.to_thread(worker.stop, 5)


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_a_rank_whose_link_breaks_catches_up_when_it_heals(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV, how: str
) -> None:
    ops = StandInStorage(disk=range(10))
    async with FaultProxy(nats_server.url) as proxy:
        worker = await asyncio.to_thread(make_rank, ops, url=proxy.url)
        assert (await (await kv.prefetch([1])).result(30)).ok
        getattr(proxy, how)()
        late = await kv.prefetch([2])
        too_late = await kv.prefetch([3], expires_in_ms=100)
        assert (await late.result(4)).state == UNANSWERED  # long enough for the dead link to be noticed
        proxy.heal()
        assert (await late.result(60)).ok
        assert (await too_late.result(60)).state == State.EXPIRED
        assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]
        await asyncio.to_thread(worker.stop, 5)


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_a_client_whose_link_breaks_reads_the_results_it_missed(
    nats_server: EmbeddedServer, make_rank: MakeRank, how: str
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    async with FaultProxy(nats_server.url) as proxy, connect(proxy.url) as kv:
        ops.gate.clear()
        handle = await kv.prefetch([1])
        await handle.accepted(30)
        getattr(proxy, how)()
        ops.gate.set()
        while ops.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.5)  # long enough for a dead link to be noticed
        proxy.heal()
        assert (await handle.result(60)).ok
        assert (await (await kv.prefetch([2])).result(60)).ok


async def test_the_consumer_deleted_on_the_server_is_made_again(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    assert (await (await kv.prefetch([1])).result(30)).ok
    nc = await nats.connect(nats_server.url)
    js = nc.jetstream()
    for consumer in await js.consumers_info(COMMANDS):
        await js.delete_consumer(COMMANDS, consumer.name)
    assert (await (await kv.prefetch([2])).result(60)).ok
    assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]
    await nc.close()


async def test_streams_deleted_on_the_server_are_made_again(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    assert (await (await kv.prefetch([1])).result(30)).ok
    nc = await nats.connect(nats_server.url)
    for stream in await nc.jetstream().streams_info():
        await nc.jetstream().delete_stream(str(stream.config.name))
    assert (await (await kv.prefetch([2])).result(60)).ok
    assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]
    await nc.close()


RANK = """
import sys, threading
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN, SAMPLES
ops = StandInStorage(disk=range(10))
if sys.argv[2] == "hang":
    ops.gate.clear()
worker = RankWorker(BusSettings(url=sys.argv[1]), RankIdentity("engine-1", 0, 1, Role.STORAGE, DOMAIN), ops)
worker.start()
assert worker.wait_ready(30)
print("ready", flush=True)
ops.entered.acquire()
print("entered", flush=True)
threading.Event().wait()
"""


class RankProcess:
    """A rank in a process of its own, to be killed."""

    def __init__(self, url: str, mode: str) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, url, mode], stdout=subprocess.PIPE, text=True, cwd=root
        )
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def hanging_rank(nats_server: EmbeddedServer) -> Iterator[RankProcess]:
    rank = RankProcess(nats_server.url, "hang")
    yield rank
    rank.kill()


async def test_a_rank_that_hangs_is_named_and_holds_up_nobody(
    make_rank: MakeRank, hanging_rank: RankProcess, kv: KV
) -> None:
    make_rank(StandInStorage(disk=range(10)))
    await until_live(kv, 2)
    handle = await kv.prefetch([1])
    assert len(handle.expected) == 2
    outcome = await handle.result(2)
    assert outcome.state == State.PARTIAL
    assert [str(name) for name in outcome.unanswered] == ["engine-1.0"]
    assert "engine-1.0" in (outcome.reason or "")
    assert [r.state for r in outcome.results] == [State.SUCCEEDED]
    assert len(await kv.engines()) == 2  # it still announces itself


async def test_a_rank_that_dies_in_the_middle_is_named_once_its_successor_speaks(
    nats_server: EmbeddedServer, make_rank: MakeRank, hanging_rank: RankProcess, kv: KV
) -> None:
    handle = await kv.prefetch([1])
    hanging_rank.expect("entered")
    hanging_rank.kill()
    ops = StandInStorage(disk=range(10))
    make_rank(ops, instance="engine-1")
    outcome = await handle.result(None)  # no time-out: it ends because the process is known to be gone
    assert outcome.state == UNANSWERED
    assert [str(name) for name in outcome.unanswered] == ["engine-1.0"]
    assert ops.calls == []  # the successor does not run what was sent to the one before
    assert (await (await kv.prefetch([2])).result(30)).ok


@pytest.mark.parametrize("minutes", [-7, 7])
async def test_clock_skew_of_minutes_does_no_harm(
    make_rank: MakeRank, kv: KV, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """This process's wall clock, which the rank and the client read, is minutes off the server's."""
    true_ns, true_s = time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + minutes * 60 * 10**9)
    monkeypatch.setattr(time, "time", lambda: true_s() + minutes * 60)
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    outcome = await (await kv.prefetch([1], expires_in_ms=30_000)).result(30)
    assert outcome.ok
    assert outcome.results[0].queued_ms < 30_000
    ops.gate.clear()
    assert (await (await kv.prefetch([2], expires_in_ms=50)).result(30)).state == State.EXPIRED
    ops.gate.set()


async def test_an_unreachable_server_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailableError, match="SEMKV_NATS_URL"):
        async with connect("nats://127.0.0.1:9", timeout=0.3):
            pass


async def test_a_rank_starts_before_its_server(tmp_path: Path, make_rank: MakeRank) -> None:
    server = EmbeddedServer(tmp_path / "late")
    server.start()
    server.kill()
    ops = StandInStorage(disk=[1])
    worker = make_rank(ops, url=server.url, wait=False)
    server.start()
    try:
        assert await asyncio.to_thread(worker.wait_ready, 60)
        async with connect(server.url) as kv:
            assert (await (await kv.prefetch([1])).result(30)).ok
    finally:
        await asyncio.to_thread(worker.stop, 5)
        await asyncio.to_thread(server.stop)


async def test_what_was_published_before_a_ranks_epoch_is_not_run(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    nc = await nats.connect(nats_server.url)
    body: dict[str, Any] = {"command_id": "old", "client": "me", "chunk_hashes": ["1"]}
    await nc.jetstream().publish(f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.all.prefetch", json.dumps(body).encode())
    # The epoch is a time of ours, the command's is the broker's: what lies within half a round trip may be either.
    await asyncio.sleep(1)
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    assert (await (await kv.prefetch([2])).result(30)).ok
    assert ops.calls == [("prefetch", (2,))]
    await nc.close()


async def test_a_small_server_limit_never_ends_a_connection(tmp_path: Path, make_rank: MakeRank) -> None:
    """Commands over the limit are split by it; a result over it loses its details, not its truth."""
    with EmbeddedServer(tmp_path / "small", config="max_payload: 4096") as server:
        ops = StandInStorage(disk=range(1000))
        worker = make_rank(ops, url=server.url)
        async with connect(server.url) as kv:
            assert (await (await kv.prefetch(list(range(300)))).result(30)).ok
            outcome = await (await kv.prefetch(list(range(300)))).result(30)
            assert outcome.ok
            assert outcome.counts() == {"already_there": 300}
            assert outcome.results[0].chunk_status == ()
            assert "message limit" in (outcome.reason or "")
            big = await kv.prefetch(list(range(1000)))
            assert (await big.result(30)).counts() == {"already_there": 300, "loaded": 700}
            assert len(big.command_ids) > 1
        worker.stop(5)


def reload(server: EmbeddedServer, old: str, new: str) -> None:
    """Changes the running server's configuration, as an operator does."""
    file = server.store_dir / "nats-server.conf"
    file.write_text(file.read_text().replace(old, new))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGHUP)


async def test_credentials_taken_away_and_given_back(tmp_path: Path) -> None:
    """nats-py gives a refused connection up for good; rank, client and event stream open another."""
    config = 'authorization { users: [ { user: a, password: "first" } ] }'
    password = tmp_path / "password"
    password.write_text("first")
    with EmbeddedServer(tmp_path / "s", config=config) as server:
        settings = BusSettings(url=server.url, user="a", password_file=password)
        ops = StandInStorage(disk=range(10))
        worker = RankWorker(settings, RankIdentity("e", 0, 1, Role.STORAGE, DOMAIN), ops)
        worker.start()
        assert worker.wait_ready(30)
        async with connect(settings=settings) as kv:
            stream = kv.finished()
            event = SAMPLES_EVENT.model_copy(update={"tenant": "default"})
            asking = asyncio.create_task(anext(stream))
            assert (await (await kv.prefetch([1])).result(30)).ok
            given_up = (await kv.session()).link.closed
            reload(server, "first", "second")
            await given_up.wait()
            reload(server, "second", "first")
            assert (await (await kv.prefetch([2])).result(60)).ok
            nc = await nats.connect(server.url, user="a", password="first")
            payload, headers = codec.encode(event)
            await nc.jetstream().publish(codec.subject_of(event), payload, headers=headers)
            assert (await asking).request_id == event.request_id
            await nc.close()
            await stream.close()
        await asyncio.to_thread(worker.stop, 5)
    assert ops.calls == [("prefetch", (1,)), ("prefetch", (2,))]
