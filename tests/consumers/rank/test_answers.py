# SPDX-License-Identifier: Apache-2.0
"""A rank's answers and the threads behind them: their order, whatever the storage gives back, and after the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import nats
import pytest

from semkv.bus import KV, codec
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Accepted, Result
from semkv.bus.status import State
from semkv.consumers.rank.pool import DaemonPool
from semkv.consumers.storage.ops import OpResult
from tests.consumers.rank.conftest import MakeRank
from tests.consumers.rank.stand_in import StandInStorage


async def test_accepted_always_comes_before_the_result(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    """Whether a command runs at once, waits for another, or is refused."""
    make_rank(StandInStorage(disk=range(100)))
    nc = await nats.connect(nats_server.url)
    heard: dict[str, list[type]] = {}

    async def hear(msg: Any) -> None:
        answer = codec.decode(msg.subject, msg.headers, msg.data)
        assert isinstance(answer, (Accepted, Result))
        heard.setdefault(answer.command_id, []).append(type(answer))

    await nc.subscribe("semkv.v1.*.*.res.>", cb=hear)
    await nc.flush()
    handles = [
        await kv.prefetch([number, number // 3], order="odd" if number % 5 == 4 else "set") for number in range(60)
    ]
    for handle in handles:
        await handle.result(60)
    await nc.flush()
    assert heard == {handle.command_id: [Accepted, Result] for handle in handles}
    await nc.close()


async def test_an_operation_is_accepted_while_it_runs(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    running, waiting = await kv.prefetch([1]), await kv.prefetch([1, 2])
    for handle in (running, waiting):
        assert len(await handle.accepted(30)) == 1
        assert not handle.done
    ops.gate.set()
    assert (await waiting.result(30)).ok


async def test_a_result_that_makes_no_sense_is_a_failed_one(make_rank: MakeRank, kv: KV) -> None:
    class Confused(StandInStorage):
        def prefetch(self, hashes: tuple[int, ...], **options: Any) -> OpResult:
            return OpResult(State.SUCCEEDED, None, ("x" * 100,), {"cpu": -1})  # type: ignore[arg-type]

    make_rank(Confused())
    outcome = await (await kv.prefetch([1])).result(30)
    assert outcome.state == State.FAILED
    assert "cannot be written" in (outcome.reason or "")
    assert (await (await kv.evict([1])).result(30)).ok


async def test_an_operation_that_outlives_its_rank_ends_quietly(
    make_rank: MakeRank, kv: KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ops = StandInStorage(disk=range(10))
    worker = make_rank(ops)
    ops.gate.clear()
    handle = await kv.evict([1])  # the stand-in's evict does not look at its control: it hangs
    await asyncio.to_thread(ops.entered.acquire)
    pool = [thread for thread in threading.enumerate() if thread.name.startswith("semkv-rank0-")]
    assert pool
    assert await asyncio.to_thread(worker.stop, 2)
    outcome = await handle.result(30)
    assert outcome.state == State.FAILED
    assert "stopped before" in (outcome.reason or "")
    ops.gate.set()
    for thread in pool:
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()
    assert raised == []


def test_a_call_that_raises_costs_no_thread() -> None:
    pool = DaemonPool(1, "test")
    done = threading.Event()
    pool.submit(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    pool.submit(done.set)
    assert done.wait(30)
    pool.close()
