# SPDX-License-Identifier: Apache-2.0
"""``GET /memory/engines``, ``/memory/traces/{id}``, ``/healthz``, ``/metrics``: who is there, how all does."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse

from semkv.bus.fields import JSON, WIRE
from semkv.consumers.gateway import traces
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.models import Engines, Health, ProblemBody
from semkv.consumers.gateway.problems import ProblemError
from semkv.consumers.gateway.routes.commands import PROBLEMS
from semkv.consumers.gateway.settings import GatewaySettings

__all__ = ["router"]

router = APIRouter()

TraceId = Annotated[str, Path(pattern=r"^[0-9a-fA-F]{32}$", description="32 hex digits, as a result has them.")]


@router.get("/memory/engines", response_model=Engines, responses=PROBLEMS)
async def engines(request: Request) -> JSONResponse:
    """The live ranks with their hash domains and tiers."""
    courier: Courier = request.app.state.courier
    live = await courier.engines()
    rows = [info.model_dump(mode="json", exclude_none=True, context={WIRE: JSON}) for info in live]
    return JSONResponse({"engines": rows})


@router.get(
    "/memory/traces/{trace_id}",
    responses={**PROBLEMS, 404: {"model": ProblemBody, "description": "No such trace, or nowhere to look"}},
)
async def trace(request: Request, trace_id: TraceId) -> JSONResponse:
    """One trace as OTLP JSON, as a result's `trace_id` names it; from Jaeger or the trace file, where one is set."""
    settings: GatewaySettings = request.app.state.settings
    try:
        found = await asyncio.to_thread(
            traces.find, trace_id.lower(), jaeger=settings.jaeger_url, file=settings.trace_file
        )
    except traces.TraceError as error:
        raise ProblemError(404, f"trace_id: {error}", field="trace_id") from None
    if found is None:
        raise ProblemError(
            404, f"trace_id: no trace {trace_id}: was it sampled, and exported already?", field="trace_id"
        )
    return JSONResponse(found)


@router.get("/healthz", response_model=Health, responses={503: {"model": Health, "description": "No bus"}})
async def healthz(request: Request) -> JSONResponse:
    """200 while NATS is reached, with or without engines; 503 otherwise. Needs no token."""
    courier: Courier = request.app.state.courier
    count = len(courier.live()) if courier.connected else 0
    status = "no bus" if not courier.connected else "ok" if count else "no engine"
    body = {"status": status, "connected": courier.connected, "engines": count}
    return JSONResponse(body, 200 if courier.connected else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, 401: PROBLEMS[401]})
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    found: Metrics = request.app.state.metrics
    return Response(found.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
