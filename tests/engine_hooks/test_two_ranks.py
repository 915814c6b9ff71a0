# SPDX-License-Identifier: Apache-2.0
"""One real vLLM with two ranks: what each rank answers, what prefetches were worth, and a rank that is killed.

vLLM's own prefix cache is on and can be emptied; the tests run in the order of this file, the last ones end the engine
and start it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semkv.bus import KV, connect, hashes, tracing
from semkv.bus.client.handle import CommandResult
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Outcome
from semkv.bus.status import State, Tier
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import TINY
from semkv.cli.devengine.server import VLLMServer
from semkv.cli.traces.store import Span, read_spans
from tests.engine_hooks.capture import Capture, stored_events
from tests.support.held_disk import HeldDisk
from tests.support.ports import free_run
from tests.support.vllm_server import tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK, RANKS, SESSION = 64, 2, "two ranks"
EMPTIED = "Successfully reset prefix cache"
CHUNK_BYTES = CHUNK * TINY.kv_bytes_per_token // RANKS
POOL_CHUNKS = 80
TOPIC = " ".join(f"note {number}: the memory of an agent remembers what was said." for number in range(30))


@dataclass
class Rig:
    nats: EmbeddedServer
    server: VLLMServer
    disk: HeldDisk
    trace_file: Path
    seen: Capture
    ssd: Path
    port: int
    chain: tuple[int, ...] = ()
    text: str = ""

    def ask(self, traceparent: str | None = None) -> dict[str, Any]:
        """The topic, greedily."""
        labels = {"session": SESSION} | ({} if traceparent is None else {"traceparent": traceparent})
        body = {"model": "tiny", "prompt": TOPIC, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        return self.server.post("/v1/completions", body | {"kv_transfer_params": {"semkv": labels}})

    async def served(self, *, forget: bool = True) -> dict[str, Any]:
        """Ask, with what vLLM itself holds emptied first unless told not to; the output is always the same."""
        if forget:
            await asyncio.to_thread(self.forget)
        answer = await asyncio.to_thread(self.ask)
        text = answer["choices"][0]["text"]
        self.text = self.text or text
        assert text == self.text
        self.chain = self.chain or hashes.parse_all(answer["kv_transfer_params"]["chunk_hashes"])
        return answer

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while a request still holds blocks."""
        until = time.monotonic() + 30
        before = self.server.log().count(EMPTIED)  # 0.18.0 answers nothing either way
        while self.server.log().count(EMPTIED) == before:
            assert time.monotonic() < until, "vLLM's prefix cache could not be emptied"
            urllib.request.urlopen(f"{self.server.url}/reset_prefix_cache", data=b"", timeout=60).close()
            time.sleep(0.1)

    def direct(self, op: str, *, rank: int | None = None) -> tuple[int, dict[str, Any]]:
        """Direct mode: the scheduler's port, or one rank's."""
        port = self.port if rank is None else self.port + 1 + rank
        body: dict[str, Any] = {"chunk_hashes": [hashes.to_legacy(chunk) for chunk in self.chain]}
        body |= {"lookup_id": "next turn", "session": SESSION}
        if op == "evict":
            body["locations"] = ["LocalCPUBackend"]
        request = urllib.request.Request(f"http://127.0.0.1:{port}/memory/{op}", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)

    def outcomes(self, command_id: str) -> list[Outcome]:
        return [m for m in self.seen.messages if isinstance(m, Outcome) and m.command_id == command_id]

    async def worth(self, command_id: str) -> tuple[int, int, int, int]:
        """What the command was worth: useful, redundant, late, wasted."""
        (outcome,) = await asyncio.to_thread(self.seen.wait_for, lambda: self.outcomes(command_id), 1, 30)
        assert (outcome.rank, outcome.instance, outcome.tenant) == (0, "engine", "default")
        return outcome.useful, outcome.redundant, outcome.late, outcome.wasted

    def spans(self, name: str) -> list[Span]:
        return [span for span in read_spans(self.trace_file) if span.name.startswith(name)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("r")
    disk, ssd, trace_file = HeldDisk(folder / "held"), folder / "ssd", folder / "trace.json"
    port = free_run(1 + RANKS)
    lmcache = LMCacheConfig(
        disk=ssd,
        chunk_size=CHUNK,
        ddr_gib=(POOL_CHUNKS + 0.5) * CHUNK_BYTES / 2**30,
        settings={
            "internal_api_server_enabled": True,
            "internal_api_server_host": "127.0.0.1",
            "internal_api_server_port_start": port,
        },
    )
    with EmbeddedServer(folder / "nats") as nats:
        server = tiny_server(
            folder / "e",
            nats.url,
            lmcache=lmcache,
            tensor_parallel=RANKS,
            prefix_caching=True,
            environment={
                tracing.ENV_FILE: str(trace_file),
                "VLLM_SERVER_DEV_MODE": "1",
                "SEMKV_DIRECT": "1",
                "SEMKV_DIRECT_WAIT_S": "3",
                **disk.environment(),
            },
        )
        with Capture(nats.url) as seen:
            try:
                server.start()
                yield Rig(nats, server, disk, trace_file, seen, ssd, port)
            finally:
                disk.release()
                server.stop()


async def do(command: Any, timeout: float = 60) -> CommandResult:
    result: CommandResult = await (await command).result(timeout)
    return result


async def to_disk(kv: KV, rig: Rig) -> None:
    """Leave the topic on the SSD only."""
    result = await do(kv.evict(rig.chain, tiers=[Tier.CPU], session=SESSION))
    assert result.state == State.SUCCEEDED, result.reason
    where = await do(kv.locate(rig.chain))
    assert [rank.chunk_tiers for rank in where.results] == [((Tier.DISK,),) * len(rig.chain)] * RANKS


async def loaded(kv: KV, rig: Rig) -> CommandResult:
    """Prefetch the topic from the SSD on every rank."""
    result = await do(kv.prefetch(rig.chain, session=SESSION))
    assert result.counts() == {"loaded": RANKS * len(rig.chain)}, result.reason
    return result


async def test_each_rank_loads_its_part_and_what_a_request_uses_was_useful(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.ENV_FILE, str(rig.trace_file))
    async with connect(rig.nats.url) as kv:
        await rig.served()
        assert len(rig.chain) > 4
        await to_disk(kv, rig)
        result = await loaded(kv, rig)
        assert [(r.rank, r.world_size, r.state, r.usable_prefix) for r in result.results] == [
            (rank, RANKS, State.SUCCEEDED, len(rig.chain)) for rank in range(RANKS)
        ]
        assert [r.bytes_by_tier for r in result.results] == [{"disk": len(rig.chain) * CHUNK_BYTES}] * RANKS
        answer = await rig.served()
    assert answer["kv_transfer_params"]["num_lmcache_cached_tokens"] >= len(rig.chain) * CHUNK
    assert await rig.worth(result.command_id) == (len(rig.chain), 0, 0, 0)

    # Each rank's hit links to what that rank did for the command.
    def linked() -> dict[int, tuple[tuple[str, str], ...]]:
        return {span.attributes["kv.rank"]: span.links for span in rig.spans("kv.retrieve") if span.links}

    def told() -> list[Span]:
        return [span for span in rig.spans("publish ") if span.name.endswith("{instance}.outcome")]

    until = time.monotonic() + 20  # spans reach the file a little later
    while (len(linked()) < RANKS or not told()) and time.monotonic() < until:  # noqa: ASYNC110 - others write them
        await asyncio.sleep(0.2)
    mine = [span for span in rig.spans("process ") if span.attributes.get("kv.command_id") == result.command_id]
    assert linked() == {span.attributes["kv.rank"]: ((span.trace_id, span.span_id),) for span in mine}
    assert len(mine) == RANKS and {span.trace_id for span in mine} == {result.results[0].trace_id}
    assert [(span.parent_id, span.attributes["kv.chunks.useful"]) for span in told()] == [
        (next(span.span_id for span in mine if span.attributes["kv.rank"] == 0), len(rig.chain))
    ]


async def test_what_the_engine_still_held_was_redundant(rig: Rig) -> None:
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await to_disk(kv, rig)
        result = await loaded(kv, rig)
        await rig.served(forget=False)
    assert await rig.worth(result.command_id) == (0, len(rig.chain), 0, 0)


async def test_what_is_evicted_before_anybody_comes_was_wasted(rig: Rig) -> None:
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await to_disk(kv, rig)
        result = await loaded(kv, rig)
        await to_disk(kv, rig)
    assert await rig.worth(result.command_id) == (0, 0, 0, len(rig.chain))


async def test_a_prefetch_that_a_request_overtakes_was_late(rig: Rig) -> None:
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await to_disk(kv, rig)
        with rig.disk.held():
            handle = await kv.prefetch(rig.chain, session=SESSION)
            await asyncio.to_thread(rig.disk.wait_for_readers, RANKS)
            await rig.served()
        result = await handle.result(60)
        assert result.counts() == {"already_there": RANKS * len(rig.chain)}, result.reason
    assert await rig.worth(result.command_id) == (0, 0, len(rig.chain), 0)


async def test_the_usable_prefix_is_what_every_rank_has(rig: Rig) -> None:
    gone = 3
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await to_disk(kv, rig)
        (file,) = rig.ssd.glob(f"*@{RANKS}@1@{rig.chain[gone]:x}@*")
        file.unlink()
        result = await do(kv.prefetch(rig.chain, session=SESSION))
        assert [rank.usable_prefix for rank in result.results] == [len(rig.chain), gone]
        assert result.usable_prefix == gone and result.state == State.PARTIAL
        statuses = [str(status) for status in result.results[1].chunk_status]
        assert statuses == ["loaded"] * gone + ["missing"] + ["unreachable"] * (len(rig.chain) - gone - 1)
        answer = await rig.served()
        assert answer["kv_transfer_params"]["num_lmcache_cached_tokens"] == gone * CHUNK


async def settled(kv: KV, rig: Rig, wanted: list[int]) -> None:
    """Wait until each rank has so many of the topic's chunks in DDR."""
    until = time.monotonic() + 30
    while True:
        located = await do(kv.locate(rig.chain))
        found = [sum(Tier.CPU in where for where in rank.chunk_tiers or ()) for rank in located.results]
        if found == wanted:
            return
        assert time.monotonic() < until, f"{found} chunks in DDR, not {wanted}"
        await asyncio.sleep(0.1)


async def test_direct_mode_forwards_to_every_rank_and_merges(rig: Rig) -> None:
    whole = len(rig.chain)
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await settled(kv, rig, [whole, whole])
        status, body = await asyncio.to_thread(rig.direct, "evict")
        assert (status, body["status"], body["num_evicted"]) == (200, "success", whole)
        assert {rank: part["counts"] for rank, part in body["ranks"].items()} == {
            "0": {"removed": whole},
            "1": {"removed": whole},
        }
        await settled(kv, rig, [0, 0])
        status, body = await asyncio.to_thread(rig.direct, "prefetch")
        assert (status, body["status"], body["num_chunks"], set(body["ranks"])) == (
            200,
            "prefetch_started",
            whole,
            {"0", "1"},
        )
        await settled(kv, rig, [whole, whole])
        status, body = await asyncio.to_thread(rig.direct, "evict", rank=1)
        assert (status, body["num_evicted"], set(body["ranks"])) == (200, whole, {"1"})
        await settled(kv, rig, [whole, 0])
    await rig.served()


async def test_direct_mode_names_a_rank_that_hangs(rig: Rig) -> None:
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await settled(kv, rig, [len(rig.chain)] * RANKS)
        hung = workers(rig)["TP1"]
        try:
            await asyncio.to_thread(stop, hung)
            status, body = await asyncio.to_thread(rig.direct, "evict")
        finally:
            os.kill(hung, signal.SIGCONT)
        assert (status, body["status"], body["num_evicted"]) == (207, "partial", len(rig.chain))
        assert "error" not in body["ranks"]["0"] and "timed out" in body["ranks"]["1"]["error"]
        await settled(kv, rig, [0, 0])  # it does what it was asked once it goes on
    await rig.served()


def stop(process: int) -> None:
    """Stop a process; while the thread that takes the signal waits for a core, its others go on, so wait for all."""
    os.kill(process, signal.SIGSTOP)
    until = time.monotonic() + 30
    while any(
        task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T"
        for task in Path(f"/proc/{process}/task").iterdir()
    ):
        assert time.monotonic() < until, f"process {process} could not be stopped"
        time.sleep(0.01)


def workers(rig: Rig) -> dict[str, int]:
    """The engine's worker processes by title."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                group = os.getpgid(int(entry.name))
            except OSError:
                continue
            if "Worker_TP" in title and group == rig.server.pid:
                found[title.rpartition("_")[2]] = int(entry.name)
    return found


async def test_a_rank_killed_during_a_prefetch_is_named_and_the_engine_starts_again_cold(rig: Rig) -> None:
    """It starts again while NATS is away, and announces itself once NATS is back."""
    async with connect(rig.nats.url) as kv:
        await rig.served()
        await to_disk(kv, rig)
        epochs = {info.rank: info.epoch for info in await kv.engines()}
        with rig.disk.held():
            handle = await kv.prefetch(rig.chain, session=SESSION)
            waiting = await asyncio.to_thread(rig.disk.wait_for_readers, RANKS)
            victim = workers(rig)["TP1"]
            assert victim in waiting
            os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        result = await handle.result(45)
        assert time.monotonic() - began < 50
        assert [name.rank for name in result.unanswered][-1:] == [1], result
        assert {r.rank for r in result.results} | {name.rank for name in result.unanswered} == {0, 1}
        assert all(r.state in (State.SUCCEEDED, State.CANCELLED, State.FAILED) for r in result.results)
        assert result.state != State.SUCCEEDED and "engine.1" in (result.reason or "")
        await asyncio.to_thread(rig.server.stop)

    await asyncio.to_thread(rig.nats.stop)
    await asyncio.to_thread(rig.server.start)
    first = await rig.served(forget=False)
    assert first["kv_transfer_params"]["num_lmcache_cached_tokens"] == 0, "the files are there, the index is cold"
    await asyncio.to_thread(rig.nats.start)
    async with connect(rig.nats.url) as kv:
        until = time.monotonic() + 30
        while len(await kv.engines()) < RANKS and time.monotonic() < until:  # noqa: ASYNC110 - as a user would
            await asyncio.sleep(0.2)
        infos = await kv.engines()
        assert [(info.rank, info.world_size, str(info.role)) for info in infos] == [(r, 2, "storage") for r in (0, 1)]
        assert len({info.hash_domain.fingerprint for info in infos}) == 1
        assert all(info.epoch > epochs[info.rank] for info in infos)
        answers = [first, *[await rig.served(forget=False) for _ in range(3)]]
        located = await do(kv.locate(rig.chain))
        assert located.state == State.SUCCEEDED and located.usable_prefix == len(rig.chain)

    def stored() -> list[Any]:
        return [event for event in stored_events(rig.nats.url) if event.request_id in wanted]

    # The stream keeps what was published after a rank made it; the first event may have come before.
    wanted = {answer["id"] for answer in answers if answer is not first}
    until = time.monotonic() + 40
    events = await asyncio.to_thread(stored)
    while len(events) < len(wanted) and time.monotonic() < until:
        events = await asyncio.to_thread(stored)
    assert sorted(event.request_id for event in events) == sorted(wanted), "each once"
    assert all(e.hashes_status == "known" and e.domain == infos[0].hash_domain.fingerprint for e in events)
