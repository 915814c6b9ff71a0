# SPDX-License-Identifier: Apache-2.0
"""The map over a real nats-server, with a rank worker that answers: events in, commands out, one trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semkv.bus import codec
from semkv.bus.client import KV, connect
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished, Outcome
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.tracing import setup_tracing
from semkv.consumers.memory import MemoryMap, Store, explain
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.gateway.conftest import DOMAIN, domain_of
from tests.consumers.rank.stand_in import StandInStorage


def event(seq: int, session: str | None, hashes: tuple[int, ...], **more: Any) -> Finished:
    fields: dict[str, Any] = {
        "tenant": "default", "domain": DOMAIN.fingerprint, "instance": "e0", "epoch": 1, "seq": seq,
        "request_id": f"r{seq}", "engine_request_id": f"r{seq}-0", "session": session, "finish_reason": "stop",
        "hashes_status": "known", "chunk_hashes": hashes, "chunk_size": 64, "prompt_tokens": 64 * len(hashes),
        "generated_tokens": 1, "arrived_at": 1, "finished_at": seq,
    }  # fmt: skip
    return Finished(**{**fields, **more})


async def publish(kv: KV, *events: Finished | Outcome) -> None:
    session = await kv.session()
    for one in events:
        payload, headers = codec.encode(one)
        await session.nc.request(codec.subject_of(one), payload, headers=headers, timeout=5)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never became true")


def last(memory: MemoryMap) -> int | None:
    """The last chunk of the session's chain."""
    chain = memory.chain("s")
    return chain.hashes[-1] if chain else None


def worker(url: str, storage: StandInStorage, **options: Any) -> RankWorker:
    started = RankWorker(
        BusSettings(url=url), RankIdentity("e0", 0, 1, Role.STORAGE, DOMAIN), storage, **options
    ).start()
    assert started.wait_ready(20)
    return started


async def test_it_follows_restarts_and_steers(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    storage = StandInStorage(disk={1, 2, 3, 4})
    rank = worker(nats_server.url, storage)
    try:
        async with connect(nats_server.url) as kv:
            await publish(kv, event(1, "s", (1, 2)))  # before there was a map
            store = Store(tmp_path / "m.db")
            async with MemoryMap(kv, store=store, agent="me") as memory:
                await memory.note("s", "customers are charged twice", topic="billing bug")
                await until(lambda: memory.chain("s") is not None)
                await publish(kv, event(2, "s", (1, 2, 3)))
                await until(lambda: last(memory) == 3)
                went_on = await memory.continue_with("let's go on with the billing bug", in_ms=20_000)
                await memory.settled()
                assert storage.cpu == {1, 2, 3}
                told = Outcome(
                    tenant="default", domain=DOMAIN.fingerprint, instance="e0", rank=0, useful=2, wasted=1,
                    lead_ms=40.5, command_id=went_on.command_id,
                )  # fmt: skip
                await publish(kv, told)
                await until(lambda: "worth" in (explain(store, went_on.command_id or "") or ""))
                text = explain(store, went_on.command_id or "")
                assert text is not None and "3 loaded" in text and "succeeded" in text
                assert "worth     e0.0: 2 useful, 1 wasted, 40.5 ms ahead" in text
            store.close()
            await publish(kv, event(3, "s", (1, 2, 3, 4)))  # while the map was away
            store = Store(tmp_path / "m.db")
            async with MemoryMap(kv, store=store, agent="me") as memory:
                await until(lambda: last(memory) == 4)
                await memory.tool_call_started("s", "search", expected_ms=20_000)
                await memory.settled()
                assert storage.cpu == {1, 2, 3, 4} and len(storage.retained) == 1
                await memory.compacted("s")
                await publish(kv, event(4, "s", (1, 2, 9)))
                await until(lambda: last(memory) == 9)
                await memory.settled()
                assert 3 in storage.cpu, "retained for the tool call that still runs"
                await memory.session_ended("s")
                await memory.settled()
                assert storage.retained == {}
                assert store.decisions.recent(limit=1)[0].moment == "session_ended"
            store.close()
    finally:
        rank.stop()


async def test_two_domains_are_told_apart_by_the_chain(nats_server: EmbeddedServer) -> None:
    storage = StandInStorage(disk={1})
    rank = worker(nats_server.url, storage)
    other_domain = domain_of(model="other")
    other_storage = StandInStorage(disk={1})
    other = RankWorker(
        BusSettings(url=nats_server.url), RankIdentity("e1", 0, 1, Role.STORAGE, other_domain), other_storage
    ).start()
    assert other.wait_ready(20)
    try:
        async with connect(nats_server.url) as kv:
            memory = MemoryMap(kv)
            memory.take(event(1, "s", (1,), domain=other_domain.fingerprint, instance="e1"))
            await memory.turn_started("s")
            await memory.settled()
            assert other_storage.cpu == {1} and storage.cpu == set()
    finally:
        rank.stop()
        other.stop()


async def test_search_decision_command_and_load_are_one_trace(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    engine_side = setup_tracing("engine", file=tmp_path / "engine.json")
    agent_side = setup_tracing("agent", file=file)
    rank = worker(nats_server.url, StandInStorage(disk={1}), tracer=engine_side)
    try:
        async with connect(nats_server.url, tracer=agent_side) as kv:
            memory = MemoryMap(kv)
            await memory.note("s", "secret words about the invoice", topic="billing", request_id="r1")
            memory.take(event(1, "s", (1,)))
            await memory.continue_with("back to billing")
            await memory.turn_started("unknown session")
            await memory.settled()
    finally:
        rank.stop()
        engine_side.shutdown()
        agent_side.shutdown()
    spans = [*_spans(file), *_spans(tmp_path / "engine.json")]
    by_name = {span["name"].split(" ")[0]: span for span in spans if span["name"] != "memory.decide"}
    decide = next(s for s in spans if s["name"] == "memory.decide" and s.get("parentSpanId"))
    assert decide["parentSpanId"] == by_name["memory.search"]["spanId"]
    published = next(s for s in spans if s["name"].startswith("publish ") and s.get("parentSpanId") == decide["spanId"])
    processed = next(s for s in spans if s["name"].startswith("process "))
    loaded = next(s for s in spans if s["name"].startswith("kv.tier.load"))
    assert {s["traceId"] for s in (decide, published, processed, loaded)} == {by_name["memory.search"]["traceId"]}
    idle = [s for s in spans if s["name"] == "memory.decide" and not s.get("parentSpanId")]
    assert len(idle) == 1, "a decision to do nothing is a span as well"
    whole = json.dumps(spans)
    assert "secret words" not in whole and "back to billing" not in whole


def _spans(file: Path) -> list[dict[str, Any]]:
    found = []
    for resource in json.loads(file.read_text(encoding="utf-8"))["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            found.extend(scope["spans"])
    return found
