# SPDX-License-Identifier: Apache-2.0
"""`POST /memory/prefetch` and `POST /memory/evict` on LMCache's internal API server, without NATS.

A process that has ranks (`ranks.storage[worker_id] = StorageOps`) acts on them itself, each once, whichever of its
ports was asked; the scheduler's process forwards the body to every rank's port in parallel, waits a bounded time, and
merges. A rank that keeps no cache of its own (`ranks.passive`) says so when it is forwarded to, and is not counted. A
process with nothing to act on answers 503. Install with `install(app, ranks, tenant=…, forward_to=…)`.

Threads: handlers run on the API server's loop, operations and questions to other ranks in daemon threads, so that
neither the loop nor the process's end ever waits for a disk or a peer.
Errors: 400 names the field; a rank that is dead or hangs is named in 207, or 504 where none answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from semkv.bus.status import ChunkStatus, Order, Tier
from semkv.consumers.rank.pool import DaemonPool
from semkv.consumers.storage.ops import Control, OpResult, StorageOps
from semkv.engine_hooks.direct.merge import PASSIVE, BadRequestError, Request, merged, read_body

_log = logging.getLogger("semkv.engine_hooks")

BODY_LIMIT = 1 << 20
FORWARD_S = 10.0
FORWARDED = "semkv-forwarded"
PREFETCHES = 256
"""Prefetches under way at once in a process; beyond, 503."""
_GONE = (ChunkStatus.REMOVED, ChunkStatus.ABSENT)
_running: set[asyncio.Future[Any]] = set()
_operations = DaemonPool(8, "semkv-direct")
_questions = DaemonPool(256, "semkv-forward")

T = TypeVar("T")


@dataclass
class Ranks:
    """The ranks that live in this process."""

    storage: dict[int, StorageOps] = field(default_factory=dict)
    passive: set[int] = field(default_factory=set)


def _prefetch(ops: StorageOps, request: Request, tenant: str) -> OpResult:
    return ops.prefetch(
        request.chunk_hashes,
        order=Order.SET,
        tier=Tier.CPU,
        budget_bytes=None,
        dry_run=False,
        control=Control(),
        tenant=tenant,
        session=request.session,
    )


def _evict(ops: StorageOps, request: Request, tenant: str) -> OpResult:
    return ops.evict(
        request.chunk_hashes,
        tiers=request.tiers,
        force=request.force,
        dry_run=False,
        control=Control(),
        tenant=tenant,
        session=request.session,
    )


def _in(pool: DaemonPool, work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns or raises on one of the pool's threads."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits for it any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error it is work's own

    def call() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    pool.submit(call)
    return done


async def act(op: str, request: Request, ranks: Mapping[int, StorageOps], tenant: str) -> dict[str, dict[str, Any]]:
    """Run on this process's own ranks: a prefetch is started, an evict is waited for."""
    if op == "prefetch":
        for ops in ranks.values():
            started = _in(_operations, functools.partial(_prefetch, ops, request, tenant))
            _running.add(started)
            started.add_done_callback(_running.discard)
        return {str(worker): {"started": True} for worker in ranks}
    results = await asyncio.gather(
        *(_in(_operations, functools.partial(_evict, ops, request, tenant)) for ops in ranks.values())
    )
    return {
        str(worker): {
            "state": str(result.state),
            "reason": result.reason,
            "counts": result.counts,
            "removed": [at for at, status in enumerate(result.chunk_status) if status is ChunkStatus.REMOVED],
            "gone": [at for at, status in enumerate(result.chunk_status) if status in _GONE],
        }
        for worker, result in zip(ranks, results, strict=True)
    }


def _post(url: str, body: bytes, seconds: float) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", FORWARDED: "1"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)


async def forward(op: str, body: bytes, urls: Mapping[int, str], seconds: float) -> dict[str, dict[str, Any]]:
    """Ask every rank in parallel; a rank that is dead or hangs is an `error` with its name."""

    async def ask(worker: int, url: str) -> tuple[str, dict[str, Any]]:
        try:
            answer = await asyncio.wait_for(
                _in(_questions, functools.partial(_post, f"{url}/memory/{op}", body, seconds)), seconds + 1.0
            )
            return str(worker), dict(answer["ranks"][str(worker)])
        except Exception as error:
            return str(worker), {"error": f"{type(error).__name__}: {error}"}

    return dict(await asyncio.gather(*(ask(worker, url) for worker, url in urls.items())))


def install(
    app: Any,
    ranks: Ranks,
    *,
    tenant: str = "default",
    forward_to: Mapping[int, str] | None = None,
    forward_s: float = FORWARD_S,
) -> None:
    """Add the routes to a FastAPI app, once; later calls only add where to forward."""
    from fastapi import Request as HttpRequest
    from fastapi.responses import JSONResponse

    if getattr(app.state, "semkv_direct", None) is not None:
        app.state.semkv_direct.update(forward_to or {})
        return
    urls = app.state.semkv_direct = dict(forward_to or {})

    async def answer(op: str, http: Any) -> Any:
        body = await http.body()
        if len(body) > BODY_LIMIT:
            return JSONResponse({"error": f"the body is larger than {BODY_LIMIT} bytes"}, 413)
        try:
            request = read_body(json.loads(body), needs_lookup_id=op == "prefetch")
        except (BadRequestError, json.JSONDecodeError, UnicodeDecodeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        forwarded = http.headers.get(FORWARDED) is not None
        if ranks.storage and len(_running) >= PREFETCHES and op == "prefetch":
            return JSONResponse({"error": f"busy: {PREFETCHES} prefetches are under way; try again later"}, 503)
        if ranks.storage:
            parts = await act(op, request, ranks.storage, tenant)
        elif ranks.passive and forwarded:
            parts = {str(worker): {PASSIVE: True} for worker in ranks.passive}
        elif urls and not forwarded:  # never passed on twice, whatever the ports say
            parts = await forward(op, body, urls, forward_s)
        else:
            return JSONResponse({"error": "no rank of this process or behind it keeps a cache"}, 503)
        status, merged_body = merged(op, len(request.chunk_hashes), request.lookup_id, parts)
        if forwarded:
            merged_body["ranks"] = parts
        return JSONResponse(merged_body, status)

    async def prefetch(http: HttpRequest) -> Any:
        return await answer("prefetch", http)

    async def evict(http: HttpRequest) -> Any:
        return await answer("evict", http)

    # FastAPI reads annotations as texts in this module's scope; the class is only known inside this function.
    prefetch.__annotations__["http"] = evict.__annotations__["http"] = HttpRequest
    app.add_api_route("/memory/prefetch", prefetch, methods=["POST"])
    app.add_api_route("/memory/evict", evict, methods=["POST"])
