# SPDX-License-Identifier: Apache-2.0
"""What a command is promised on a healthy server: one truthful end per rank, in order, on time, shared, cancellable."""

from __future__ import annotations

import asyncio
import json
import time

import nats
import pytest

from semkv.bus import KV, codec, connect
from semkv.bus.domain import HashDomain
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import AmbiguousDomainError, DomainMismatchError, NoEngineError
from semkv.bus.hashes import HashError
from semkv.bus.messages import Accepted, Result
from semkv.bus.status import ChunkStatus, Role, State, Tier
from tests.consumers.rank.conftest import MakeRank, until_live
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN

OTHER = HashDomain(**{**DOMAIN.model_dump(), "kv_dtype": "fp8", "chunk_size": 16})


async def test_every_rank_accepts_and_ends_exactly_once(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    for rank in range(3):
        make_rank(StandInStorage(disk=range(10)), rank=rank, world_size=3)
    nc = await nats.connect(nats_server.url)
    heard: list[object] = []

    async def hear(msg: object) -> None:
        heard.append(codec.decode(msg.subject, msg.headers, msg.data))  # type: ignore[attr-defined]

    await nc.subscribe("semkv.v1.*.*.res.>", cb=hear)
    await nc.flush()
    handle = await kv.prefetch([1, 2, 99], session="s")
    assert len(await handle.accepted(30)) == 3
    outcome = await handle.result(30)
    assert outcome.state == State.PARTIAL
    assert outcome.unanswered == ()
    assert [(r.rank, r.chunk_status) for r in outcome.results] == [
        (rank, (ChunkStatus.LOADED, ChunkStatus.LOADED, ChunkStatus.MISSING)) for rank in range(3)
    ]
    assert outcome.results[0].counts == {"loaded": 2, "missing": 1}
    assert outcome.usable_prefix == 2
    await nc.flush()
    kinds = [(type(m), m.rank) for m in heard if isinstance(m, (Accepted, Result))]
    assert sorted(kinds, key=str) == sorted([(t, r) for t in (Accepted, Result) for r in range(3)], key=str)
    await nc.close()


async def test_all_operations(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=[1, 2, 3])
    make_rank(ops)
    assert (await (await kv.prefetch([1, 2])).result()).ok
    located = await (await kv.locate([1, 3, 4])).result()
    assert located.results[0].chunk_tiers == ((Tier.CPU, Tier.DISK), (Tier.DISK,), ())
    assert (await (await kv.retain("s", [1], ttl_s=60)).result()).ok
    evicted = await (await kv.evict([1, 2], tiers=[Tier.CPU])).result()
    assert evicted.results[0].chunk_status == (ChunkStatus.SHARED, ChunkStatus.REMOVED)
    assert (await (await kv.release("s")).result()).ok
    assert (await (await kv.evict([1])).result()).results[0].chunk_status == (ChunkStatus.REMOVED,)
    assert (await (await kv.prefetch(["2", "-1"], order="set", dry_run=True)).result()).counts() == {
        "loaded": 1, "missing": 1,
    }  # fmt: skip


async def test_no_engine_is_an_error_at_once(kv: KV, make_rank: MakeRank) -> None:
    with pytest.raises(NoEngineError, match="no engine is live"):
        await kv.prefetch([1])
    make_rank(StandInStorage(), instance="a")
    await until_live(kv, 1)
    with pytest.raises(NoEngineError, match=r"instance 'b'.*live are a"):
        await kv.prefetch([1], instance="b")
    with pytest.raises(NoEngineError, match="domain 'abc'"):
        await kv.prefetch([1], domain="abc")


async def test_a_passive_rank_is_announced_but_not_expected(kv: KV, make_rank: MakeRank) -> None:
    make_rank(StandInStorage(), rank=1, world_size=2, role=Role.PASSIVE)
    make_rank(StandInStorage(disk=[1]), rank=0, world_size=2)
    await until_live(kv, 2)
    handle = await kv.prefetch([1])
    assert [name.rank for name in handle.expected] == [0]
    assert (await handle.result()).ok


async def test_several_domains_must_be_told_apart(kv: KV, make_rank: MakeRank) -> None:
    make_rank(StandInStorage(disk=[1]), instance="a")
    make_rank(StandInStorage(disk=[1]), instance="b", domain=OTHER)
    await until_live(kv, 2)
    with pytest.raises(AmbiguousDomainError, match=OTHER.fingerprint):
        await kv.prefetch([1])
    assert (await (await kv.prefetch([1], domain=OTHER)).result()).results[0].instance == "b"
    assert (await (await kv.prefetch([1], instance="a")).result()).results[0].instance == "a"
    with pytest.raises(DomainMismatchError, match="kv_dtype: ours 'fp8', its 'bfloat16'"):
        await kv.prefetch([1], instance="a", domain=OTHER)


async def test_a_rank_rejects_another_domain_with_its_own(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=[1])
    make_rank(ops)
    nc = await nats.connect(nats_server.url)
    answers = await nc.subscribe("semkv.v1.default.*.res.me.>")
    payload = json.dumps({"command_id": "c1", "client": "me", "chunk_hashes": ["1"]}).encode()
    await nc.publish(f"semkv.v1.default.{OTHER.fingerprint}.cmd.engine-0.prefetch", payload)
    while True:
        answer = json.loads((await answers.next_msg(30)).data)
        if "state" in answer:
            break
    assert answer["state"] == "rejected"
    assert HashDomain.model_validate(answer["hash_domain"]).differences(OTHER).keys() == {"kv_dtype", "chunk_size"}
    assert ops.calls == []
    await nc.close()


async def test_overlapping_commands_run_in_stream_order_and_disjoint_ones_side_by_side(
    make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(100))
    make_rank(ops, threads=2)
    ops.gate.clear()
    first = await kv.prefetch([1, 2, 3])
    ops.entered.acquire()
    second = await kv.evict([3, 4])
    third = await kv.prefetch([4, 5])
    apart = await kv.prefetch([50])
    await asyncio.to_thread(ops.entered.acquire)
    assert list(ops.calls) == [("prefetch", (1, 2, 3)), ("prefetch", (50,))]
    ops.gate.set()
    for handle in (first, second, third, apart):
        assert (await handle.result(30)).unanswered == ()
    assert [c for c in ops.calls if c[1] != (50,)] == [
        ("prefetch", (1, 2, 3)),
        ("evict", (3, 4)),
        ("prefetch", (4, 5)),
    ]
    assert ops.most_running <= 2


async def test_overlapping_prefetches_of_two_clients_share_the_loads(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    async with connect(nats_server.url) as other:
        a = await kv.prefetch([1, 2, 3, 4])
        b = await other.prefetch([1, 2, 3, 4, 5])
        await b.accepted(30)
        ops.gate.set()
        first, second = await a.result(30), await b.result(30)
    assert first.counts() == {"loaded": 4}
    assert second.counts() == {"already_there": 4, "loaded": 1}
    assert sorted(ops.loads) == [1, 2, 3, 4, 5]


async def test_expiry_in_the_queue_does_not_wait_for_the_queue(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    running = await kv.prefetch([1])
    waiting = await kv.prefetch([1, 2], expires_in_ms=100)
    behind = await kv.prefetch([2])
    outcome = await waiting.result(30)
    assert outcome.state == State.EXPIRED
    assert outcome.results[0].chunk_status == (ChunkStatus.NOT_TRIED,) * 2
    assert not running.done
    assert not behind.done  # it still waits for what is before the expired one: order holds
    ops.gate.set()
    assert (await running.result(30)).ok
    assert (await behind.result(30)).ok
    assert ("prefetch", (1, 2)) not in ops.calls


async def test_expiry_in_the_middle_says_what_was_loaded(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10), cpu=[])
    make_rank(ops)
    ops.gate.clear()
    outcome = await (await kv.prefetch([1, 2], expires_in_ms=150)).result(30)
    assert outcome.state == State.EXPIRED
    assert outcome.counts() == {"not_tried": 2}


async def test_cancel_in_the_queue_and_in_the_middle(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    running, waiting = await kv.prefetch([1, 2]), await kv.prefetch([2, 3])
    await asyncio.to_thread(ops.entered.acquire)
    cancelled = await waiting.cancel()
    assert (await cancelled.result(30)).ok
    assert (await waiting.result(30)).state == State.CANCELLED
    assert not running.done
    await running.cancel()
    outcome = await running.result(30)
    assert outcome.state == State.CANCELLED
    assert outcome.counts() == {"not_tried": 2}
    late = await (await running.cancel()).result(30)
    assert late.state == State.REJECTED
    assert "no command" in (late.reason or "")


async def test_a_command_sent_twice_runs_once_inside_the_window(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    first = await (await kv.prefetch([1], command_id="same")).result(30)
    again = await kv.prefetch([1], command_id="same")
    assert again.duplicate
    second = await again.result(30)
    assert second.duplicate
    assert second.results == first.results
    assert len(ops.calls) == 1


async def test_a_command_sent_twice_runs_once_outside_the_window(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    """Without a message id the server does not recognise the repetition, as after its window has passed."""
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    nc = await nats.connect(nats_server.url)
    answers = await nc.subscribe("semkv.v1.default.*.res.me.same.>")
    payload = json.dumps({"command_id": "same", "client": "me", "chunk_hashes": ["1"]}).encode()
    ends = []
    for _ in range(2):
        await nc.publish(f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.all.prefetch", payload)
        while True:
            answer = (await answers.next_msg(30)).data
            if b'"state"' in answer:
                ends.append(answer)
                break
    assert ends[0] == ends[1]
    assert len(ops.calls) == 1
    await nc.close()


async def test_a_storage_that_raises_is_a_failed_result(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=[1])
    make_rank(ops)
    ops.fail_with = RuntimeError("disk on fire")
    outcome = await (await kv.prefetch([1])).result(30)
    assert outcome.state == State.FAILED
    assert "disk on fire" in (outcome.reason or "")
    ops.fail_with = None
    assert (await (await kv.prefetch([1])).result(30)).ok


async def test_unknown_words_are_rejected_by_name(make_rank: MakeRank, kv: KV) -> None:
    make_rank(StandInStorage())
    for options in ({"order": "diagonal"}, {"tier": "tape"}):
        outcome = await (await kv.prefetch([1], **options)).result(30)  # type: ignore[arg-type]
        assert outcome.state == State.REJECTED
        assert next(iter(options.values())) in (outcome.reason or "")
    assert (await (await kv.evict([1], tiers=[])).result(30)).state == State.REJECTED


async def test_a_command_over_the_limit_is_split_and_its_results_are_one(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(5000))
    make_rank(ops)
    handle = await kv.prefetch(list(range(5000)))
    assert len(handle.command_ids) == 2
    outcome = await handle.result(60)
    assert outcome.ok
    assert outcome.counts() == {"loaded": 5000}
    assert outcome.usable_prefix == 5000
    assert len(outcome.results[0].chunk_status) == 5000


async def test_bad_hashes_are_refused_before_anything_is_sent(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage()
    make_rank(ops)
    for bad in (["1", "0x2"], [1, 1 << 63], "12", [1.5]):
        with pytest.raises(HashError):
            await kv.prefetch(bad)  # type: ignore[arg-type]
    assert ops.calls == []


async def test_hostile_messages_are_counted_and_never_stop_a_rank(
    nats_server: EmbeddedServer, make_rank: MakeRank, kv: KV
) -> None:
    ops = StandInStorage(disk=[1])
    worker = make_rank(ops)
    nc = await nats.connect(nats_server.url)
    answers = await nc.subscribe("semkv.v1.default.*.res.me.>")
    subject = f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.all"
    whole = {"command_id": "x1", "client": "me", "chunk_hashes": ["1"]}
    await nc.publish(f"{subject}.prefetch", b"\xc1garbage")
    await nc.publish(f"{subject}.prefetch", b"{" * 10_000)
    await nc.publish(f"{subject}.dance", json.dumps(whole).encode())
    await nc.publish(f"{subject}.prefetch", json.dumps({**whole, "tenant": "other"}).encode())
    await nc.publish(f"{subject}.prefetch", json.dumps({**whole, "chunk_hashes": ["zz"], "command_id": "x2"}).encode())
    rejected = {}
    while len(rejected) < 2:
        answer = json.loads((await answers.next_msg(30)).data)
        if "state" in answer:
            rejected[answer["command_id"]] = answer
    assert set(rejected) == {"x1", "x2"}
    assert "position 0" in rejected["x2"]["reason"]
    assert (await (await kv.prefetch([1])).result(30)).ok
    assert worker.dropped == {"malformed": 2, "unknown_type": 1, "mismatch": 1, "invalid": 1}
    assert ops.calls == [("prefetch", (1,))]
    await nc.close()


async def test_nothing_is_ever_sent_to_a_reply_subject(nats_server: EmbeddedServer, make_rank: MakeRank) -> None:
    make_rank(StandInStorage(disk=[1]))
    nc = await nats.connect(nats_server.url)
    js = nc.jetstream()
    await js.add_stream(name="TRAP", subjects=["trap.>"])
    await js.delete_stream("SEMKV_COMMANDS")  # so that no acknowledgement goes there either
    await js.add_stream(name="SEMKV_COMMANDS", subjects=["semkv.v1.*.*.cmd.>"], no_ack=True)
    answers = await nc.subscribe("semkv.v1.default.*.res.me.>")
    payload = json.dumps({"command_id": "c", "client": "me", "chunk_hashes": ["1"]}).encode()
    deadline = time.monotonic() + 60
    number = 0
    while True:  # the rank may need a moment to read the new stream
        number += 1
        body = payload.replace(b'"c"', f'"c{number}"'.encode())
        await nc.publish(f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.all.prefetch", body, reply="trap.reply")
        try:
            await answers.next_msg(2)
            break
        except nats.errors.TimeoutError:
            assert time.monotonic() < deadline
    assert (await js.stream_info("TRAP")).state.messages == 0
    await nc.close()


async def test_the_registry_shows_a_rank_in_full_and_loses_it_when_it_stops(make_rank: MakeRank, kv: KV) -> None:
    worker = make_rank(StandInStorage(cpu=[1, 2]))
    (info,) = await kv.engines()
    assert info.hash_domain == DOMAIN
    assert info.role == Role.STORAGE
    assert worker.stop(10)
    await until_live(kv, 0)
    with pytest.raises(NoEngineError):
        await kv.prefetch([1])


async def test_stopping_a_rank_answers_what_it_has(make_rank: MakeRank, kv: KV) -> None:
    ops = StandInStorage(disk=range(10))
    worker = make_rank(ops)
    ops.gate.clear()
    running, waiting = await kv.prefetch([1]), await kv.prefetch([1, 2])
    await waiting.accepted(30)
    await asyncio.to_thread(ops.entered.acquire)
    assert await asyncio.to_thread(worker.stop, 10)
    assert (await running.result(30)).state == State.CANCELLED
    outcome = await waiting.result(30)
    assert outcome.state == State.CANCELLED
    assert "stopping" in (outcome.reason or "")
