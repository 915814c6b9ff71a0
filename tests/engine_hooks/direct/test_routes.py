# SPDX-License-Identifier: Apache-2.0
"""Direct mode over real HTTP: today's answers, ranks in one process, ranks behind the scheduler, dead and hung ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

import uvicorn
from fastapi import FastAPI

from semkv.bus import hashes as text
from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import LMCacheStorage, PrefixForest
from semkv.consumers.storage.ops import OpResult, StorageOps
from semkv.engine_hooks.direct import routes
from semkv.engine_hooks.direct.routes import Ranks, install
from semkv.engine_hooks.patches import apply_all
from tests.support.lmcache_engine import Rig, lmcache_engine


class Served:
    """An app on a free port, ended at the end of the test."""

    def __init__(self, ranks: dict[int, StorageOps], passive: set[int] | None = None, **kwargs: Any) -> None:
        self.app = FastAPI()
        install(self.app, Ranks(ranks, passive or set()), **kwargs)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < until
            time.sleep(0.01)

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A real engine."""
    apply_all()
    with lmcache_engine(tmp_path) as made:
        yield made


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts apps and stops them."""
    running: list[Served] = []

    def start(ranks: dict[int, StorageOps], **kwargs: Any) -> Served:
        running.append(Served(ranks, **kwargs))
        return running[-1]

    yield start
    for served in running:
        served.stop()


def storage(rig: Rig) -> LMCacheStorage:
    return LMCacheStorage(rig.engine, PrefixForest("default"))


def hexes(hashes: tuple[int, ...]) -> list[str]:
    return [text.to_legacy(h) for h in hashes]


def test_a_rank_acts_itself_with_todays_answers(rig: Rig, serve: Any) -> None:
    served = serve({0: storage(rig)})
    tokens = rig.tokens(3)
    chunk_hashes = hexes(rig.store(tokens))
    status, body = served.post("/memory/evict", {"chunk_hashes": chunk_hashes, "locations": ["LocalCPUBackend"]})
    assert (status, body["status"], body["num_evicted"]) == (200, "success", 3)
    assert rig.counts()["hot"] == {}
    status, body = served.post("/memory/prefetch", {"chunk_hashes": chunk_hashes, "lookup_id": "turn_prefetch"})
    assert (status, body["status"], body["lookup_id"], body["num_chunks"]) == (
        200,
        "prefetch_started",
        "turn_prefetch",
        3,
    )
    rig.wait_for(lambda: len(rig.cpu.hot_cache) == 3, "the prefetch")
    assert served.post("/memory/evict", {"chunk_hashes": chunk_hashes})[1]["num_evicted"] == 3
    assert served.post("/memory/evict", {"chunk_hashes": chunk_hashes})[1]["num_evicted"] == 0
    rig.wait_for(lambda: rig.cpu.cpu_lock.acquire(blocking=False) and rig.cpu.cpu_lock.release() is None, "quiet")
    rig.check()


class Asked:
    """Stands in for a rank: notes what it is asked, and says what it is told to say."""

    def __init__(self, *said: ChunkStatus) -> None:
        self.said = said
        self.calls: list[dict[str, Any]] = []

    def prefetch(self, hashes: tuple[int, ...], **asked: Any) -> OpResult:
        self.calls.append({"op": "prefetch", "hashes": hashes, **asked})
        return OpResult(State.SUCCEEDED)

    def evict(self, hashes: tuple[int, ...], **asked: Any) -> OpResult:
        self.calls.append({"op": "evict", "hashes": hashes, **asked})
        return OpResult(State.SUCCEEDED, chunk_status=self.said)

    def told(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in call.items() if name != "control"} for call in self.calls]


def test_what_the_body_says_is_what_each_rank_of_the_process_is_asked_once(serve: Any) -> None:
    ranks = {0: Asked(ChunkStatus.REMOVED), 3: Asked(ChunkStatus.ABSENT)}
    served = serve(ranks, tenant="acme")
    body = {"chunk_hashes": ["1"], "locations": ["LocalDiskBackend"], "session": "s", "force": True, "lookup_id": "x"}
    status, answer = served.post("/memory/evict", body)
    assert (status, answer["num_evicted"]) == (200, 1)
    assert answer["ranks"]["3"] == {"state": "succeeded", "reason": None, "counts": {"absent": 1}}
    assert served.post("/memory/evict", {"chunk_hashes": ["1"]})[0] == 200
    assert served.post("/memory/prefetch", body)[0] == 200
    asked = {"hashes": (1,), "dry_run": False, "tenant": "acme"}
    wanted = [
        {"op": "evict", **asked, "tiers": (Tier.DISK,), "force": True, "session": "s"},
        {"op": "evict", **asked, "tiers": None, "force": False, "session": None},
        # hashes from REST come in any order
        {"op": "prefetch", **asked, "order": Order.SET, "tier": Tier.CPU, "budget_bytes": None, "session": "s"},
    ]
    until = time.monotonic() + 20
    while any(len(rank.calls) < 3 for rank in ranks.values()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [rank.told() for rank in ranks.values()] == [wanted] * 2


def test_a_chunk_is_evicted_where_a_rank_removed_it_and_none_has_it_left(serve: Any) -> None:
    removed, absent, in_use = ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.IN_USE
    workers = {0: serve({0: Asked(removed, removed, absent)}), 1: serve({1: Asked(absent, in_use, absent)})}
    scheduler = serve({}, forward_to={number: worker.url for number, worker in workers.items()})
    status, body = scheduler.post("/memory/evict", {"chunk_hashes": ["1", "2", "3"]})
    assert (status, body["num_evicted"]) == (200, 1)


def test_a_body_over_the_limit_is_413(serve: Any) -> None:
    rank = Asked()
    status, answer = serve({0: rank}).post("/memory/evict", b"[" + b" " * routes.BODY_LIMIT + b"]")
    assert (status, str(routes.BODY_LIMIT) in answer["error"], rank.calls) == (413, True, [])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "object"),
        (b"{", "Expecting"),
        ({}, "chunk_hashes"),
        ({"chunk_hashes": []}, "chunk_hashes"),
        ({"chunk_hashes": "abc"}, "chunk_hashes"),
        ({"chunk_hashes": ["zz"]}, "position 0"),
        ({"chunk_hashes": ["1", "0x2"]}, "position 1"),
        ({"chunk_hashes": ["1", 2]}, "position 1"),
        ({"chunk_hashes": ["1"] * (text.MAX_PER_MESSAGE + 1)}, f"at most {text.MAX_PER_MESSAGE}"),
        ({"chunk_hashes": [f"{1 << 64:x}"]}, "position 0"),
        ({"chunk_hashes": ["1"], "locations": []}, "locations"),
        ({"chunk_hashes": ["1"], "locations": "LocalCPUBackend"}, "locations"),
        ({"chunk_hashes": ["1"], "locations": ["Nowhere"]}, "Nowhere"),
        ({"chunk_hashes": ["1"], "force": "yes"}, "force"),
    ],
)
def test_a_bad_body_is_400_with_the_field_and_nothing_runs(serve: Any, body: Any, named: str) -> None:
    status, answer = serve({0: object()}).post("/memory/evict", body)
    assert status == 400
    assert named in answer["error"]


def test_prefetch_needs_its_label(serve: Any) -> None:
    status, answer = serve({0: object()}).post("/memory/prefetch", {"chunk_hashes": ["1"]})
    assert (status, "lookup_id" in answer["error"]) == (400, True)


def test_the_scheduler_forwards_to_all_ranks_and_merges(rig: Rig, serve: Any) -> None:
    workers = {number: serve({number: storage(rig)}) for number in (0, 1)}
    scheduler = serve({}, forward_to={number: worker.url for number, worker in workers.items()})
    chunk_hashes = hexes(rig.store(rig.tokens(3)))
    status, body = scheduler.post("/memory/evict", {"chunk_hashes": chunk_hashes})
    assert (status, body["num_evicted"], set(body["ranks"])) == (200, 3, {"0", "1"})
    status, body = scheduler.post("/memory/prefetch", {"chunk_hashes": chunk_hashes, "lookup_id": "x"})
    assert (status, set(body["ranks"])) == (200, {"0", "1"})


def test_a_dead_and_a_hung_rank_are_named_in_bounded_time(rig: Rig, serve: Any) -> None:
    alive = serve({0: storage(rig)})
    with socket.socket() as hung, socket.socket() as dead:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        dead.bind(("127.0.0.1", 0))
        urls = {0: alive.url} | {
            number: f"http://127.0.0.1:{place.getsockname()[1]}" for number, place in ((1, hung), (2, dead))
        }
        scheduler = serve({}, forward_to=urls, forward_s=1.0)
        status, body = scheduler.post("/memory/evict", {"chunk_hashes": hexes(rig.store(rig.tokens(2)))})
        assert (status, body["num_evicted"]) == (207, 2)
        assert "error" in body["ranks"]["1"] and "error" in body["ranks"]["2"]
        nobody = serve({}, forward_to={1: urls[1], 2: urls[2]}, forward_s=1.0)
        assert nobody.post("/memory/evict", {"chunk_hashes": ["1"]})[0] == 504


def test_passive_ranks_are_shown_and_not_counted(rig: Rig, serve: Any) -> None:
    """A rank that keeps no cache of its own, as with MLA, stands in for one: its process has none to act on."""
    acting, passive = serve({0: storage(rig)}), serve({}, passive={1})
    scheduler = serve({}, forward_to={0: acting.url, 1: passive.url})
    chunk_hashes = hexes(rig.store(rig.tokens(3)))
    status, body = scheduler.post("/memory/evict", {"chunk_hashes": chunk_hashes})
    assert (status, body["status"], body["num_evicted"]) == (200, "success", 3)
    assert body["ranks"]["1"] == {"passive": True}
    status, body = scheduler.post("/memory/prefetch", {"chunk_hashes": chunk_hashes, "lookup_id": "x"})
    assert (status, body["ranks"]["1"]) == (200, {"passive": True})
    assert passive.post("/memory/evict", {"chunk_hashes": chunk_hashes})[0] == 503
    acting.stop()
    assert scheduler.post("/memory/evict", {"chunk_hashes": chunk_hashes})[0] == 504


_HANGS = """
import asyncio, threading
from semkv.engine_hooks.direct import routes
from semkv.engine_hooks.direct.merge import Request

class Hangs:
    def prefetch(self, *_, **__):
        threading.Event().wait()
    evict = prefetch

async def main():
    request = Request((1,), "x", None, None, False)
    print(await routes.act("prefetch", request, {0: Hangs()}, "default"))
    try:
        await asyncio.wait_for(routes.act("evict", request, {0: Hangs()}, "default"), 0.1)
    except asyncio.TimeoutError:
        print("waited long enough")

asyncio.run(main())
"""


def test_an_operation_that_never_returns_does_not_hold_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["{'0': {'started': True}}", "waited long enough"]


def test_every_rank_is_asked_at_once(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = 40
    together = threading.Barrier(many, timeout=60)

    def post(url: str, body: bytes, seconds: float) -> Any:
        together.wait()  # returns only if all are asked side by side
        return {"ranks": {url.partition("://")[2].partition("/")[0]: {"started": True}}}

    monkeypatch.setattr(routes, "_post", post)
    scheduler = serve({}, forward_to={number: f"rank://{number}" for number in range(many)}, forward_s=60.0)
    status, body = scheduler.post("/memory/prefetch", {"chunk_hashes": ["1"], "lookup_id": "x"})
    assert (status, len(body["ranks"])) == (200, many)


def test_prefetches_are_bounded(rig: Rig, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve({0: storage(rig)})
    body = {"chunk_hashes": ["1"], "lookup_id": "x"}
    monkeypatch.setattr(routes, "PREFETCHES", 0)
    status, answer = served.post("/memory/prefetch", body)
    assert (status, "busy" in answer["error"]) == (503, True)
    monkeypatch.setattr(routes, "PREFETCHES", 1)
    assert served.post("/memory/prefetch", body)[0] == 200


def test_a_process_with_neither_answers_503_and_never_forwards_twice(serve: Any) -> None:
    alone = serve({})
    assert alone.post("/memory/evict", {"chunk_hashes": ["1"]})[0] == 503
    install(alone.app, Ranks(), forward_to={0: alone.url})
    status, body = alone.post("/memory/evict", {"chunk_hashes": ["1"]})
    assert status == 504
    assert "503" in body["ranks"]["0"]["error"]
