# SPDX-License-Identifier: Apache-2.0
"""The map and its policy: moments to commands, over a client that records what it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from semkv.bus.errors import NoEngineError
from semkv.bus.hashes import HashError
from semkv.bus.status import HashesStatus
from semkv.consumers.memory import Budget, MemoryMap, Policy, Store, Timing, explain
from tests.consumers.memory.recording import RecordingKV, finished


def a_map(kv: RecordingKV, store: Store | None = None, **options: object) -> MemoryMap:
    return MemoryMap(kv, store=store, agent="me", **options)  # type: ignore[arg-type]


async def test_a_turn_prefetches_the_sessions_chain_in_order_with_a_deadline() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    memory.take(finished("s", (1, 2, 3), 1))
    (decision,) = await memory.turn_started("s")
    await memory.settled()
    assert kv.ops() == ["prefetch"] and kv.asked[0].hashes == (1, 2, 3)
    options = kv.asked[0].options
    assert options["domain"] == "d0" and options["session"] == "s" and options["expires_in_ms"] == 2000
    why = memory.why(decision.command_id or "")
    assert why is not None and why.outcome == "succeeded" and why.result["ranks"][0]["counts"] == {"loaded": 3}
    await memory.close()


async def test_an_unknown_session_does_nothing_and_says_why() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    (decision,) = await memory.turn_started("never seen")
    assert (decision.action, decision.command_id) == ("nothing", None) and "no chain" in decision.reason
    assert kv.ops() == []


async def test_a_tool_call_retains_and_prefetches_within_its_pause() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    memory.take(finished("s", (1, 2), 1))
    await memory.tool_call_started("s", "search", expected_ms=4000)
    await memory.settled()
    assert kv.ops() == ["retain", "prefetch"]
    assert kv.asked[0].options["ttl_s"] == 34 and kv.asked[1].options["expires_in_ms"] == 4000
    await memory.close()


async def test_a_tools_usual_time_is_learnt() -> None:
    memory = a_map(RecordingKV())
    memory.take(finished("s", (1, 2), 1))
    await memory.tool_call_started("s", "search")
    await memory.tool_call_ended("s")
    assert memory.store.sessions.tool_ms("me", "search") is not None
    for _ in range(20):
        memory.store.sessions.learn_tool("me", "search", 7000)
    assert (memory.store.sessions.tool_ms("me", "search") or 0) > 6500
    await memory.settled()
    await memory.close()


async def test_a_long_pause_is_prefetched_near_its_end_and_an_earlier_need_overtakes_it() -> None:
    kv = RecordingKV()
    memory = a_map(kv, policy=Policy(Timing(hold_ms=1000)))
    memory.take(finished("s", (1, 2), 1))
    (planned,) = await memory.will_resume("s", in_ms=3_600_000)
    assert kv.ops() == [] and planned.details["delay_ms"] == 3_599_000 and planned.outcome == "waiting"
    (again,) = await memory.will_resume("s", in_ms=3_600_000)
    assert again.action == "nothing" and planned.command_id is not None and planned.command_id in again.reason
    await memory.turn_started("s")
    await asyncio.wait_for(memory.settled(), 20)
    assert kv.ops() == ["prefetch"]
    overtaken = memory.why(planned.command_id)
    assert overtaken is not None and overtaken.outcome == "overtaken"
    await memory.close()


async def test_the_lead_follows_what_loading_took() -> None:
    kv = RecordingKV()
    memory = a_map(kv, policy=Policy(Timing(hold_ms=10, margin=2)))
    memory.take(finished("s", tuple(range(1, 101)), 1))
    await memory.turn_started("s")
    await memory.settled()  # 100 chunks in 8 ms
    (decision,) = await memory.will_resume("s", in_ms=100_000)
    assert decision.action == "nothing" and "already asked" in decision.reason
    memory.take(finished("s", tuple(range(1, 1001)), 2))
    (decision,) = await memory.will_resume("s", in_ms=100_000)
    assert decision.details["lead_ms"] == 160 and decision.details["delay_ms"] == 100_000 - 160
    await memory.close()


@pytest.mark.parametrize("nothing_known", [None, [], ()])
async def test_an_empty_write_back_evicts_nothing(nothing_known: list[str] | None) -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    memory.take(finished("s", (1, 2, 3), 1))
    assert await memory.write_back("s", nothing_known) is None
    decisions = await memory.compacted("s", nothing_known)
    memory.take(finished("s", (), 2, hashes_status=HashesStatus.UNKNOWN))
    memory.take(finished("s", (), 3, hashes_status=HashesStatus.KNOWN))
    await memory.settled()
    assert kv.ops() == [] and [d.action for d in decisions] == ["nothing"]
    assert memory.chain("s") is not None


async def test_a_compaction_evicts_what_the_next_prompt_dropped_and_others_do_not_use() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    memory.take(finished("s", (1, 2, 3, 4), 1))
    memory.take(finished("other", (1, 2, 3, 9), 2))
    await memory.compacted("s")
    assert kv.ops() == []
    memory.take(finished("s", (1, 2, 7), 3))
    await memory.settled()
    assert kv.ops() == ["evict"] and kv.asked[0].hashes == (4,), "3 belongs to the other session as well"
    assert kv.asked[0].options["session"] == "s"
    # Once: the next chain is an ordinary one.
    memory.take(finished("s", (1, 8), 4))
    await memory.settled()
    assert kv.ops() == ["evict"]


async def test_hashes_of_a_compaction_in_legacy_text() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    await memory.write_back("s", ["-6ed9a448787a198f", "1f", "20"])
    await memory.compacted("s", ["-6ed9a448787a198f", "30"])
    await memory.settled()
    assert kv.asked[0].hashes == (0x1F, 0x20)
    with pytest.raises(HashError):
        await memory.compacted("s", ["0x30"])
    with pytest.raises(HashError):
        await memory.write_back("s", ["zz"])


async def test_a_closed_topic_frees_only_what_no_other_topic_reads() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    await memory.note("s", "the bill is wrong", topic="billing", request_id="r1")
    memory.take(finished("s", (1, 2, 3), 1))
    await memory.note("s", "now the garden", topic="garden", request_id="r2")
    memory.take(finished("s", (1, 5, 6), 2))
    await memory.topic_closed("s", "billing")
    await memory.settled()
    assert kv.ops() == ["evict"] and kv.asked[0].hashes == (2, 3) and kv.asked[0].options["tiers"] is None
    (again,) = await memory.topic_closed("s", "billing")
    assert again.action == "nothing"
    # A conversation that went on still reads its earlier topics.
    memory.take(finished("s", (1, 5, 6, 7), 3, request_id="r9"))
    (kept,) = await memory.topic_closed("s", "nothing of that name")
    assert kept.action == "nothing"


async def test_a_sessions_end_gives_back_and_keeps_the_disk_unless_it_is_to_be_forgotten() -> None:
    kv = RecordingKV()
    memory = a_map(kv)
    memory.take(finished("s", (1, 2), 1))
    await memory.tool_call_started("s", "x", expected_ms=10)
    await memory.session_ended("s")
    await memory.settled()
    assert kv.ops()[-2:] == ["release", "evict"] and kv.asked[-1].options["tiers"] == ("cpu",)
    assert memory.chain("s") is not None, "it can be resumed"
    await memory.session_ended("s", forget=True)
    await memory.settled()
    assert kv.asked[-1].options["tiers"] is None and memory.chain("s") is None


async def test_a_moment_with_an_id_is_carried_out_once_over_a_restart(tmp_path: Path) -> None:
    kv = RecordingKV()
    memory = a_map(kv, Store(tmp_path / "m.db"))
    memory.take(finished("s", (1, 2), 1))
    (first,) = await memory.turn_started("s", moment_id="turn-7")
    await memory.settled()
    (second,) = await memory.turn_started("s", moment_id="turn-7")
    assert first.command_id == second.command_id and kv.ops() == ["prefetch"]
    await memory.close()
    memory.store.close()
    restarted = a_map(kv, Store(tmp_path / "m.db"))
    (third,) = await restarted.turn_started("s", moment_id="turn-7")
    assert third.command_id == first.command_id and kv.ops() == ["prefetch"]
    restarted.store.close()


async def test_the_same_prefetch_is_not_asked_twice_while_it_runs() -> None:
    kv = RecordingKV(gate=asyncio.Event())
    memory = a_map(kv)
    memory.take(finished("s", (1, 2), 1))
    (first,) = await memory.turn_started("s")
    (second,) = await memory.turn_started("s")
    assert second.action == "nothing" and (first.command_id or "?") in second.reason
    memory.take(finished("s", (1, 2, 3), 2))
    (third,) = await memory.turn_started("s")
    assert third.acted, "another chain is another prefetch"
    assert kv.gate is not None
    kv.gate.set()
    await memory.settled()
    await memory.close()


@pytest.mark.parametrize("under_way", [False, True])
async def test_a_prefetch_after_an_evict_is_no_repeat(under_way: bool) -> None:
    kv = RecordingKV(gate=asyncio.Event())
    assert kv.gate is not None
    memory = a_map(kv)
    memory.take(finished("s", (1, 2), 1))
    await memory.turn_started("s")
    if not under_way:
        kv.gate.set()
        await memory.settled()
    await memory.session_ended("s")
    kv.gate.set()
    await memory.settled()
    (back,) = await memory.will_resume("s", in_ms=100)
    await memory.settled()
    assert back.acted and kv.ops() == ["prefetch", "evict", "prefetch"]
    await memory.close()


async def test_budgets_are_per_agent_survive_a_restart_and_name_their_numbers(tmp_path: Path) -> None:
    kv = RecordingKV()
    store = Store(tmp_path / "m.db")
    memory = a_map(kv, store, budget=Budget(prefetched_chunks_per_minute=5), budgets={"rich": Budget()})
    memory.take(finished("s", (1, 2, 3), 1))
    memory.take(finished("t", (7, 8, 9), 2))
    memory.take(finished("u", (4, 5, 6), 3))
    assert (await memory.turn_started("s"))[0].acted
    (refused,) = await memory.turn_started("t")
    assert not refused.acted and "3 chunks prefetched" in refused.reason and "5 allowed" in refused.reason
    assert (await memory.turn_started("u", agent="rich"))[0].acted
    await memory.settled()
    await memory.close()
    again = a_map(kv, store, budget=Budget(prefetched_chunks_per_minute=5))
    assert not (await again.turn_started("t"))[0].acted
    with pytest.raises(ValueError, match="under_way: -1"):
        Budget(under_way=-1)
    store.close()


async def test_an_engine_that_is_away_is_an_outcome_and_not_an_exception() -> None:
    kv = RecordingKV(error=NoEngineError("no live engine serves domain d0"))
    memory = a_map(kv)
    memory.take(finished("s", (1, 2), 1))
    (decision,) = await memory.turn_started("s")
    await memory.settled()
    why = memory.why(decision.command_id or "")
    assert why is not None and why.outcome == "failed" and "no live engine" in why.result["error"]
    # … and the next moment tries again.
    kv.error = None
    (again,) = await memory.turn_started("s")
    assert again.acted
    await memory.settled()


async def test_continue_finds_warms_and_explains(tmp_path: Path) -> None:
    kv = RecordingKV()
    store = Store(tmp_path / "m.db")
    memory = a_map(kv, store)
    await memory.note("s1", "customers are charged twice at checkout", topic="billing bug", request_id="r1")
    memory.take(finished(None, (11, 12), 1))  # the engine was not told the session; the request's id tells
    await memory.note("s2", "ferns for the balcony", topic="garden", intent="plan", request_id="r2")
    memory.take(finished("s2", (21, 22), 2))
    went_on = await memory.continue_with("let's go on with the billing bug", session="s2", in_ms=1500)
    await memory.settled()
    assert went_on.chain is not None and went_on.chain.hashes == (11, 12)
    assert kv.asked[-1].hashes == (11, 12) and kv.asked[-1].options["expires_in_ms"] == 1500
    assert went_on.command_id is not None
    text = explain(store, went_on.command_id)
    assert text is not None and "billing bug" in text and "shares" in text and "succeeded" in text and "r1" in text
    assert "2 loaded, 4.0 MB, 8.0 ms" in text and "0af7651916cd43dd8448eb211c80319c" in text
    unsure = await memory.continue_with("what is the capital of Mongolia")
    assert unsure.command_id is None and unsure.decisions[0].action == "nothing"
    assert explain(store, "not-ours") is None
    store.close()


async def test_following_resumes_where_it_stopped_counts_losses_and_takes_repeats_once(tmp_path: Path) -> None:
    kv = RecordingKV(events=[finished("s", (1, 2), 1), finished("s", (1, 2, 3), 2)])
    store = Store(tmp_path / "m.db")
    memory = a_map(kv, store)
    await memory.follow()
    store.close()
    store = Store(tmp_path / "m.db")
    kv.events = [finished("s", (1, 2, 3), 2), finished("s", (1, 2, 3, 4), 5), finished("s", (9,), 1, epoch=2)]
    again = a_map(kv, store)
    await again.follow()
    assert kv.resumed_with == [{"after": 0}, {"after": 0}], "the recording client has no places in a stream"
    assert store.lost() == 2
    assert [leaf.hashes for leaf in store.chains.leaves("s")] == [(9,), (1, 2, 3, 4)]
    store.close()


async def test_nonsense_is_refused_by_name() -> None:
    memory = a_map(RecordingKV())
    with pytest.raises(ValueError, match="session: ''"):
        await memory.turn_started("")
    with pytest.raises(ValueError, match="in_ms: -5"):
        await memory.will_resume("s", in_ms=-5)


async def test_switched_off_it_remembers_and_asks_for_nothing() -> None:
    kv = RecordingKV()
    memory = a_map(kv, enabled=False)
    memory.take(finished("s", (1, 2, 3), 1))
    decisions = [*await memory.turn_started("s"), *await memory.session_ended("s", forget=True)]
    await memory.settled()
    assert kv.ops() == [] and {d.reason for d in decisions} == {"the map's commands are switched off"}


async def test_an_event_that_cannot_be_taken_in_does_not_keep_the_others_out(caplog: pytest.LogCaptureFixture) -> None:
    bad = finished("s", (1,), 1, finished_at="yesterday", chunk_size=None)
    kv = RecordingKV(events=[bad, finished("s", (2, 3), 2)])
    memory = a_map(kv)
    await memory.follow()
    chain = memory.chain("s")
    assert chain is not None and chain.hashes == (2, 3)
    assert "r1 was passed over" in caplog.text


async def test_a_requests_event_can_be_waited_for() -> None:
    memory = a_map(RecordingKV())
    waiting = asyncio.create_task(memory.heard_of("r1", 20))
    unknown = asyncio.create_task(memory.heard_of("r2", 20))
    gone = asyncio.create_task(memory.heard_of("r1", 20))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    memory.take(finished("s", (1, 2), 1))
    memory.take(finished("s", (), 2, hashes_status=HashesStatus.UNKNOWN))
    chain = await waiting
    assert chain is not None and chain.hashes == (1, 2)
    assert await memory.heard_of("r1", 0) == memory.chain("s"), "it came before it was asked for"
    assert await unknown is None
    assert await memory.heard_of("r3", 0.01) is None
    assert not memory._awaited, "nothing is kept for whoever has given up"


async def test_following_goes_on_after_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    class Troubled(RecordingKV):
        def finished(self, **options: object):  # type: ignore[no-untyped-def, override]
            self.resumed_with.append(options)
            if len(self.resumed_with) == 1:
                raise NoEngineError("away")
            return super().finished(**options)

    monkeypatch.setattr("semkv.consumers.memory.map._AGAIN_S", 0.01)
    kv = Troubled(events=[finished("s", (2, 3), 2)])
    async with a_map(kv) as memory:
        for _ in range(1000):
            if memory.chain("s") is not None:
                break
            await asyncio.sleep(0.01)
        assert memory.chain("s") is not None
