# SPDX-License-Identifier: Apache-2.0
"""``POST /memory/prefetch``, ``/evict``, ``/retain``, ``/release``, ``/locate`` and ``/memory/commands/{id}``.

Prefetch and evict take the bodies of today's agents and give the answers that these read. Order is not trusted from
here: hashes are a set, each once. Prefetch answers when every rank accepted, the rest when every rank answered;
``?wait=SECONDS`` changes for how long.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse

from semkv.bus import hashes as codec
from semkv.bus.status import Order
from semkv.consumers.gateway.answers import Report, chunk_tiers, num_evicted, reply
from semkv.consumers.gateway.counting import Later
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.courier import Target as Where
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.models import (
    Answer,
    EvictBody,
    LocateBody,
    PrefetchBody,
    ProblemBody,
    ReleaseBody,
    RetainBody,
    Target,
)
from semkv.consumers.gateway.problems import ProblemError
from semkv.consumers.gateway.settings import GatewaySettings

__all__ = ["router"]

_TIERS = {"LocalCPUBackend": "cpu", "LocalDiskBackend": "disk", "RemoteBackend": "remote"}

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ProblemBody, "description": text}
    for code, text in {
        400: "Bad input, by field and position; nothing was executed",
        401: "No or a wrong bearer token",
        413: "The body is too large",
        429: "Too many requests at once",
        503: "No engine, or no bus",
    }.items()
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    **PROBLEMS,
    207: {"model": Answer, "description": "Some ranks answered, or some failed: each rank's part"},
    502: {"model": Answer, "description": "Every rank failed or refused"},
    504: {"model": Answer, "description": "No rank answered in time; the command may still run"},
}
_FORCE: dict[int | str, dict[str, Any]] = {
    **_ANSWERS,
    403: {"model": ProblemBody, "description": "This caller may not force"},
}

router = APIRouter(prefix="/memory")

Wait = Annotated[
    float | None,
    Query(
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds to wait for every rank's result; bounded by the gateway.",
    ),
]
CommandId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="As an answer gave it.")]


def _courier(request: Request) -> Courier:
    courier: Courier = request.app.state.courier
    return courier


def _settings(request: Request) -> GatewaySettings:
    settings: GatewaySettings = request.app.state.settings
    return settings


def _where(body: Target) -> Where:
    return Where(body.instance, body.domain, body.model)


def _hashes(texts: list[str]) -> tuple[int, ...]:
    """Each hash once, in the order given; what the model let through is refused by position."""
    return tuple(dict.fromkeys(codec.parse(text, position) for position, text in enumerate(texts)))


def _bounded(request: Request, wait: float | None, default: float) -> float:
    settings = _settings(request)
    return min(default if wait is None else wait, settings.wait_limit_s)


def _answer(
    request: Request, report: Report, *, waited: bool, started: str = "", dry_run: bool = False, **more: Any
) -> JSONResponse:
    if waited:
        metrics: Metrics = request.app.state.metrics
        metrics.report(report, dry_run=dry_run)
    status, body = reply(report, waited=waited, started=started, **more)
    return JSONResponse(body, status)


@router.post("/prefetch", response_model=Answer, response_model_exclude_none=True, responses=_ANSWERS)
async def prefetch(request: Request, body: PrefetchBody, wait: Wait = None) -> JSONResponse:
    """Load chunks into a faster tier. Answers when every rank accepted, or with ``wait`` when it is done."""
    ticket = await _courier(request).send(
        "prefetch", _where(body), _hashes(body.chunk_hashes), traceparent=request.state.traceparent, order=Order.SET,
        session=body.session, tier=body.tier, expires_in_ms=body.expires_in_ms, budget_bytes=body.budget_bytes,
        dry_run=body.dry_run,
    )  # fmt: skip
    more: dict[str, Any] = {"lookup_id": body.lookup_id, "num_chunks": len(body.chunk_hashes)}
    if wait is None:
        report = await ticket.accepted(_settings(request).accept_s)
        later: Later = request.app.state.later
        later.count(ticket, dry_run=body.dry_run)
        return _answer(request, report, waited=False, started="prefetch_started", **more)
    report = await ticket.result(_bounded(request, wait, 0.0))
    return _answer(request, report, waited=True, started="prefetch_done", dry_run=body.dry_run, **more)


@router.post("/evict", response_model=Answer, response_model_exclude_none=True, responses=_FORCE)
async def evict(request: Request, body: EvictBody, wait: Wait = None) -> JSONResponse:
    """Free chunks that nobody else's conversation needs; the others are reported as shared or in use."""
    if body.force and not request.state.may_force:
        raise ProblemError(403, "force: this caller may not evict what others still use", field="force")
    tiers = None if body.locations is None else tuple(dict.fromkeys(_TIERS[name] for name in body.locations))
    ticket = await _courier(request).send(
        "evict", _where(body), _hashes(body.chunk_hashes), traceparent=request.state.traceparent, session=body.session,
        tiers=tiers, force=body.force, dry_run=body.dry_run,
    )  # fmt: skip
    report = await ticket.result(_bounded(request, wait, _settings(request).result_s))
    more: dict[str, Any] = {"num_evicted": num_evicted(report), "num_chunks": len(body.chunk_hashes)}
    return _answer(request, report, waited=True, dry_run=body.dry_run, **more)


@router.post("/retain", response_model=Answer, response_model_exclude_none=True, responses=_ANSWERS)
async def retain(request: Request, body: RetainBody, wait: Wait = None) -> JSONResponse:
    """Keep chunks from being evicted, until released or the time is over."""
    ticket = await _courier(request).send(
        "retain", _where(body), body.session, _hashes(body.chunk_hashes), traceparent=request.state.traceparent,
        ttl_s=body.ttl_s,
    )  # fmt: skip
    report = await ticket.result(_bounded(request, wait, _settings(request).result_s))
    return _answer(request, report, waited=True, num_chunks=len(body.chunk_hashes))


@router.post("/release", response_model=Answer, response_model_exclude_none=True, responses=_ANSWERS)
async def release(request: Request, body: ReleaseBody, wait: Wait = None) -> JSONResponse:
    """Give back what this gateway retains for a session."""
    ticket = await _courier(request).send("release", _where(body), body.session, traceparent=request.state.traceparent)
    report = await ticket.result(_bounded(request, wait, _settings(request).result_s))
    return _answer(request, report, waited=True)


@router.post("/locate", response_model=Answer, response_model_exclude_none=True, responses=_ANSWERS)
async def locate(request: Request, body: LocateBody, wait: Wait = None) -> JSONResponse:
    """Which tiers hold each chunk, in the order asked."""
    wanted = _hashes(body.chunk_hashes)
    ticket = await _courier(request).send("locate", _where(body), wanted, traceparent=request.state.traceparent)
    report = await ticket.result(_bounded(request, wait, _settings(request).result_s))
    tiers = dict(zip(wanted, chunk_tiers(report, len(wanted)), strict=True))
    places = [tiers[codec.parse(text)] for text in body.chunk_hashes]
    return _answer(request, report, waited=True, num_chunks=len(body.chunk_hashes), chunk_tiers=places)


@router.get(
    "/commands/{command_id}", response_model=Answer, response_model_exclude_none=True,
    responses={**_ANSWERS, 404: {"model": ProblemBody, "description": "Not known, or forgotten after 10 minutes"}},
)  # fmt: skip
async def command(request: Request, command_id: CommandId, wait: Wait = None) -> JSONResponse:
    """What became of a command: always 200 with each rank's part as known now, or with ``wait`` as an operation's."""
    report = await _courier(request).find(command_id, _bounded(request, wait, 0.0))
    if report is None:
        raise ProblemError(404, f"command_id: {command_id!r} is not known: never given, or more than 10 minutes ago")
    status, body = reply(report, waited=True)
    if wait is None and status == 504:
        status, body["status"] = 200, "running"
        body.pop("error", None)
    return JSONResponse(body, status)


@router.delete("/commands/{command_id}", status_code=202, responses={**PROBLEMS, 404: {"model": ProblemBody}})
async def cancel(request: Request, command_id: CommandId) -> JSONResponse:
    """Ask the ranks to stop a command between chunks."""
    if not await _courier(request).cancel(command_id):
        raise ProblemError(404, f"command_id: {command_id!r} was not given by this gateway")
    return JSONResponse({"status": "cancelling", "command_id": command_id}, 202)
