# SPDX-License-Identifier: Apache-2.0
"""``GET /memory/engines``, ``/healthz`` and ``/metrics``: who is there, and how the gateway does."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from semkv.bus.fields import JSON, WIRE
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.models import Engines, Health
from semkv.consumers.gateway.routes.commands import PROBLEMS

__all__ = ["router"]

router = APIRouter()


@router.get("/memory/engines", response_model=Engines, responses=PROBLEMS)
async def engines(request: Request) -> JSONResponse:
    """The live ranks with their hash domains and tiers."""
    courier: Courier = request.app.state.courier
    live = await courier.engines()
    rows = [info.model_dump(mode="json", exclude_none=True, context={WIRE: JSON}) for info in live]
    return JSONResponse({"engines": rows})


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
