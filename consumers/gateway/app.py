# SPDX-License-Identifier: Apache-2.0
"""The gateway as an ASGI application: ``create_app(settings)``.

The application owns one connection to the bus, made when it starts and closed when it stops, and nothing global. It
starts without NATS and answers 503 until NATS is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles

from semkv.bus.tracing import NullTracer
from semkv.consumers.gateway import problems
from semkv.consumers.gateway.counting import Later, count_events
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.guard import Guard
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.observe import Observed
from semkv.consumers.gateway.routes import commands, events, status
from semkv.consumers.gateway.settings import GatewaySettings

__all__ = ["create_app"]


def create_app(settings: GatewaySettings | None = None, *, tracer: NullTracer | None = None) -> FastAPI:
    """The application for these settings, by default those of the environment."""
    chosen = settings or GatewaySettings.from_env()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        courier = Courier(chosen, tracer)
        app.state.courier = courier
        app.state.metrics = Metrics(courier.live, lambda: courier.connected)
        later = app.state.later = Later(app.state.metrics, chosen.wait_limit_s, chosen.requests)
        app.state.stopping = asyncio.Event()
        courier.start()
        counting = asyncio.create_task(count_events(courier, app.state.metrics))
        try:
            yield
        finally:
            app.state.stopping.set()
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
            await later.close()
            await courier.close()

    app = FastAPI(
        title="semkv gateway",
        summary="Prefetch, evict, retain and locate KV cache chunks over plain HTTP",
        version="1",
        lifespan=lifespan,
    )
    app.state.settings = chosen
    problems.install(app)
    for router in (commands.router, events.router, status.router):
        app.include_router(router)
    app.add_api_route("/", lambda: RedirectResponse("/ui/"), include_in_schema=False)
    app.mount("/ui", StaticFiles(directory=Path(__file__).parent / "ui", html=True), name="ui")
    if chosen.tokens:
        _document_tokens(app)
    app.add_middleware(Observed)
    app.add_middleware(Guard, settings=chosen)  # added last, so outermost
    return app


def _document_tokens(app: FastAPI) -> None:
    """Shows on the OpenAPI page that a token is needed."""
    plain = app.openapi

    def with_tokens() -> dict[str, object]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
        return schema

    app.openapi = with_tokens  # type: ignore[method-assign]  # FastAPI's documented way to extend it
