# SPDX-License-Identifier: Apache-2.0
"""Server-sent events with resume, metrics, and the truth while NATS is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from semkv.bus import codec
from semkv.bus.client import connect
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished, Outcome, Result
from semkv.bus.settings import BusSettings
from semkv.consumers.gateway.following import Answers
from semkv.consumers.gateway.settings import GatewaySettings, GatewaySettingsError
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import DOMAIN, Gateway, running
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import SAMPLES


def finished(seq: int, session: str | None = None, hashes: tuple[int, ...] = (1, -2)) -> Finished:
    return Finished(
        tenant="default", domain=DOMAIN.fingerprint, instance="e0", epoch=1, seq=seq, request_id=f"r{seq}",
        engine_request_id=f"r{seq}-0", session=session, finish_reason="stop", hashes_status="known",
        chunk_hashes=hashes, chunk_size=64, prompt_tokens=128, generated_tokens=1, arrived_at=1, finished_at=2,
    )  # fmt: skip


async def publish(url: str, *events: Any) -> None:
    async with connect(url) as kv:
        session = await kv.session()
        for event in events:
            payload, headers = codec.encode(event)
            await session.nc.request(codec.subject_of(event), payload, headers=headers, timeout=5)


@dataclass
class Event:
    id: int
    name: str
    data: dict[str, Any]


async def read(answer: httpx.Response) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if not line:
            if "data" in fields:
                yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    found = []
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    return found


async def test_events_come_live_and_a_reader_that_comes_back_misses_none(
    gateway: Gateway, nats_server: EmbeddedServer
) -> None:
    async with gateway.client.stream("GET", "/memory/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read(answer)
        (ready,) = await take(events, 1)
        assert ready.name == "ready"
        await publish(nats_server.url, finished(1, "s1"), finished(2, "s2"))
        first, second = await take(events, 2)
    assert (first.name, first.data["session"], first.data["chunk_hashes"]) == (
        "finished", "s1", ["0000000000000001", "fffffffffffffffe"],
    )  # fmt: skip
    await publish(nats_server.url, finished(3, "s1"), finished(4, "s2"))
    headers = {"Last-Event-ID": str(second.id)}
    async with gateway.client.stream("GET", "/memory/events", headers=headers) as answer:
        _, third, fourth = await take(read(answer), 3)
    assert [third.data["seq"], fourth.data["seq"]] == [3, 4]
    async with gateway.client.stream("GET", "/memory/events?after=0&session=s2") as answer:
        _, *only = await take(read(answer), 3)
    assert [event.data["seq"] for event in only] == [2, 4]


async def test_what_the_stream_no_longer_keeps_is_told(gateway: Gateway, nats_server: EmbeddedServer) -> None:
    await publish(nats_server.url, *(finished(n) for n in range(1, 6)))
    async with connect(nats_server.url) as kv:
        session = await kv.session()
        await session.nc.jetstream().purge_stream("SEMKV_EVENTS", seq=4)
    async with gateway.client.stream("GET", "/memory/events?after=1") as answer:
        _, gap, event = await take(read(answer), 3)
    assert (gap.name, gap.data) == ("gap", {"first": 2, "last": 3}) and event.data["seq"] == 4


async def test_a_bad_position_is_refused(gateway: Gateway) -> None:
    answer = await gateway.client.get("/memory/events", headers={"Last-Event-ID": "x1"})
    assert answer.status_code == 400 and answer.json()["field"] == "Last-Event-ID"
    assert (await gateway.client.get("/memory/events?after=-1")).status_code == 400
    assert (await gateway.client.get("/memory/events?type=gossip")).json()["field"] == "type"


async def test_a_stream_goes_on_over_a_restart_of_nats(gateway: Gateway, nats_server: EmbeddedServer) -> None:
    async with gateway.client.stream("GET", "/memory/events") as answer:
        events = read(answer)
        await take(events, 1)
        nats_server.stop()
        nats_server.start()
        await publish(nats_server.url, finished(1))
        (event,) = await asyncio.wait_for(take(events, 1), 60)
    assert event.data["seq"] == 1


async def test_streams_end_when_the_gateway_stops_and_are_bounded(settings: GatewaySettings) -> None:
    async with (
        running(replace(settings, streams=1)) as gateway,
        gateway.client.stream("GET", "/memory/events") as answer,
    ):
        events = read(answer)
        await take(events, 1)
        refused = await gateway.client.get("/memory/events")
        assert refused.status_code == 429
        gateway.server.should_exit = True
        assert await asyncio.wait_for(take(events, 1), 30) == []


async def test_metrics(gateway: Gateway, rank_of: Callable[..., RankWorker], nats_server: EmbeddedServer) -> None:
    rank_of(StandInStorage(disk={1}))
    await gateway.post("prefetch?wait=20", {"chunk_hashes": ["1", "2"], "lookup_id": "x"})
    await gateway.post("prefetch", {"lookup_id": "x"})
    outcome = Outcome(
        tenant="default", domain=DOMAIN.fingerprint, instance="e0", command_id="c", rank=0, useful=7, late=2
    )
    wanted = [
        'semkv_gateway_requests_total{route="/memory/prefetch",status="200"} 1.0',
        'semkv_gateway_requests_total{route="/memory/prefetch",status="400"} 1.0',
        'semkv_gateway_chunks_total{op="prefetch",status="loaded"} 1.0',
        'semkv_gateway_chunks_total{op="prefetch",status="missing"} 1.0',
        'semkv_prefetched_chunks_total{fate="useful"} 7.0',
        'semkv_tier_used_bytes{instance="e0",rank="0",tier="cpu"}',
        "semkv_gateway_bus_connected 1.0",
        "semkv_engine_ranks 1.0",
    ]
    await publish(nats_server.url, outcome)
    for _ in range(200):
        text = (await gateway.client.get("/metrics")).text
        if all(line in text for line in wanted):
            break
        await asyncio.sleep(0.05)
    for line in wanted:
        assert line in text, line
    engines = (await gateway.client.get("/memory/engines")).json()["engines"]
    assert engines[0]["instance"] == "e0" and engines[0]["hash_domain"]["model"] == "tiny"


async def test_it_starts_without_nats_says_so_and_works_once_nats_is_there(
    nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], settings: GatewaySettings
) -> None:
    nats_server.stop()
    body = {"chunk_hashes": ["1"], "lookup_id": "x"}
    async with running(settings) as gateway:
        answer = await gateway.post("prefetch", body)
        assert answer.status_code == 503 and "no connection to NATS" in answer.json()["error"]
        health = await gateway.client.get("/healthz")
        assert health.status_code == 503 and health.json()["status"] == "no bus"
        nats_server.start()
        rank_of(StandInStorage(disk={1}))
        for _ in range(300):
            answer = await gateway.post("prefetch", body)
            if answer.status_code == 200:
                break
            await asyncio.sleep(0.1)
        assert answer.status_code == 200, answer.text
        assert (await gateway.client.get("/healthz")).json()["status"] == "ok"


async def test_requests_in_flight_end_with_the_truth_when_nats_or_the_engine_goes_away(
    nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], gateway: Gateway
) -> None:
    storage = StandInStorage(cpu={1})
    storage.gate.clear()
    worker = rank_of(storage)
    try:
        going = asyncio.create_task(gateway.post("evict?wait=4", {"chunk_hashes": ["1"]}))
        await asyncio.to_thread(storage.entered.acquire)
        nats_server.stop()
        answer = await asyncio.wait_for(going, 40)
        assert answer.status_code == 504 and answer.json()["unanswered"] == ["e0.0"]
        refused = await gateway.post("evict", {"chunk_hashes": ["1"]})
        assert refused.status_code == 503 and "NATS" in refused.json()["error"]
    finally:
        storage.gate.set()
    nats_server.start()
    told = await gateway.client.get(f"/memory/commands/{answer.json()['command_id']}")
    for _ in range(200):
        told = await gateway.client.get(f"/memory/commands/{answer.json()['command_id']}?wait=1")
        if told.status_code == 200:
            break
        await asyncio.sleep(0.1)
    assert told.json()["ranks"][0]["counts"] == {"removed": 1}
    worker.stop()
    for _ in range(200):
        gone = await gateway.post("evict", {"chunk_hashes": ["1"]})
        if gone.status_code == 503:
            break
        await asyncio.sleep(0.1)
    assert gone.status_code == 503 and "no live engine" in gone.json()["error"]


@pytest.mark.parametrize("tenant", ["default", "team-b"])
async def test_a_gateway_speaks_for_one_tenant(
    nats_server: EmbeddedServer, settings: GatewaySettings, tenant: str
) -> None:
    await publish(nats_server.url, finished(1))
    bus = BusSettings(url=nats_server.url, tenant=tenant)
    async with (
        running(replace(settings, bus=bus)) as gateway,
        gateway.client.stream("GET", "/memory/events?after=0") as answer,
    ):
        events = read(answer)
        await take(events, 1)
        await publish(nats_server.url, finished(2).model_copy(update={"tenant": tenant}))
        (event,) = await take(events, 1)
    assert event.data["seq"] == (1 if tenant == "default" else 2)


async def test_answers_to_anybodys_commands_and_the_engines_tiers_are_followed(
    gateway: Gateway, nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker]
) -> None:
    rank_of(StandInStorage(disk={1}))
    where = "/memory/events?type=accepted&type=result&type=engines"
    async with gateway.client.stream("GET", where) as answer:
        lines = answer.aiter_lines()

        async def following(name: str) -> tuple[dict[str, Any], bool]:
            """The data of the next event of that name, and whether it has an id."""
            has_id = False
            async for line in lines:
                has_id = (has_id and bool(line)) or line.startswith("id:")
                if line == f"event: {name}":
                    return json.loads((await anext(lines)).removeprefix("data: ")), has_id
            raise AssertionError(f"no {name} came")

        await following("ready")
        engines, has_id = await following("engines")
        while not engines["engines"]:
            engines, has_id = await following("engines")
        assert engines["engines"][0]["instance"] == "e0" and not has_id
        async with connect(nats_server.url, client="somebody-else") as kv:
            handle = await kv.prefetch([1, 9])
            accepted, _ = await following("accepted")
            result, has_id = await following("result")
    assert accepted["command_id"] == result["command_id"] == handle.command_id and not has_id
    assert (result["client"], result["counts"], result["state"]) == (
        "somebody-else", {"loaded": 1, "missing": 1}, "partial",
    )  # fmt: skip
    assert "chunk_status" not in result, "as long as its command, and of no use without its hashes"


async def test_a_reader_may_begin_a_little_earlier(gateway: Gateway, nats_server: EmbeddedServer) -> None:
    await publish(nats_server.url, *(finished(n) for n in range(1, 8)))
    for last, expected in ((2, [6, 7]), (100, [1, 2, 3, 4, 5, 6, 7])):
        async with gateway.client.stream("GET", f"/memory/events?last={last}") as answer:
            _, *events = await take(read(answer), 1 + len(expected))
        assert [event.data["seq"] for event in events] == expected
    assert (await gateway.client.get("/memory/events?last=10001")).json()["field"] == "last"


async def test_a_slow_reader_of_answers_loses_the_oldest_and_is_told(nats_server: EmbeddedServer) -> None:
    sample = next(sample for sample in SAMPLES if isinstance(sample, Result))
    async with connect(nats_server.url) as kv:
        nc = (await kv.session()).nc
        async with Answers(nc, "semkv.v1.*.*.res.>") as answers:
            payload, headers = codec.encode(sample)
            for _ in range(1003):
                await nc.publish(codec.subject_of(sample), payload, headers=headers)
            await nc.publish(codec.subject_of(sample), b"\xc1", headers=headers)
            await nc.flush()
            for _ in range(1000):
                if answers.lost == 3:
                    break
                await asyncio.sleep(0.01)
            assert (await answers.get()).command_id == sample.command_id
    assert answers.lost == 3


class TestTraces:
    ID, OTHER = "ab" * 16, "cd" * 16
    DOCUMENT: ClassVar[dict[str, Any]] = {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"traceId": ID, "spanId": "01" * 8, "name": "mine"}, {"traceId": OTHER, "spanId": "02" * 8, "name": "other"},
    ]}]}]}  # fmt: skip

    async def test_of_a_file(self, settings: GatewaySettings, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        async with running(replace(settings, trace_file=file)) as gateway:
            assert (await gateway.client.get(f"/memory/traces/{self.ID}")).status_code == 404
            file.write_text(json.dumps(self.DOCUMENT))
            (resource,) = (await gateway.client.get(f"/memory/traces/{self.ID.upper()}")).json()["resourceSpans"]
            assert [span["name"] for span in resource["scopeSpans"][0]["spans"]] == ["mine"]
            file.write_text("something else")
            answer = await gateway.client.get(f"/memory/traces/{self.ID}")
            assert answer.status_code == 404 and "no OTLP JSON" in answer.json()["error"]
            assert (await gateway.client.get("/memory/traces/zz")).status_code == 400

    async def test_of_nowhere_says_what_to_set(self, gateway: Gateway) -> None:
        answer = await gateway.client.get(f"/memory/traces/{self.ID}")
        assert answer.status_code == 404 and "SEMKV_JAEGER_URL" in answer.json()["error"]

    async def test_of_jaeger(self, settings: GatewaySettings) -> None:
        """Jaeger is a stand-in that answers as Jaeger's query API does."""
        asked = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
            body = json.dumps({"result": self.DOCUMENT}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with running(replace(settings, jaeger_url=url)) as gateway:
            found = (await gateway.client.get(f"/memory/traces/{self.ID}")).json()
            server.close()
            gone = await gateway.client.get(f"/memory/traces/{self.OTHER}")
        assert len(found["resourceSpans"]) == 1 and asked == [f"/api/v3/traces/{self.ID}"]
        assert gone.status_code == 404 and "cannot be asked" in gone.json()["error"]

    def test_an_address_that_is_none(self) -> None:
        with pytest.raises(GatewaySettingsError, match="SEMKV_JAEGER_URL: 'jaeger:16686' is no http address"):
            GatewaySettings(jaeger_url="jaeger:16686")
