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
from fastapi.staticfiles import StaticFiles

from semkv.bus import codec
from semkv.bus.errors import BusError
from semkv.bus.messages import Outcome
from semkv.bus.tracing import NullTracer
from semkv.consumers.gateway import problems
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.guard import Guard
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.observe import Observed
from semkv.consumers.gateway.routes import commands, events, status
from semkv.consumers.gateway.settings import GatewaySettings

__all__ = ["create_app"]

_RETRY_S = 1.0


def create_app(settings: GatewaySettings | None = None, *, tracer: NullTracer | None = None) -> FastAPI:
    """The application for these settings, by default those of the environment."""
    chosen = settings or GatewaySettings.from_env()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        courier = Courier(chosen, tracer)
        app.state.courier = courier
        app.state.metrics = Metrics(courier.live, lambda: courier.connected)
        app.state.stopping = asyncio.Event()
        courier.start()
        counting = asyncio.create_task(_count_events(courier, app.state.metrics))
        try:
            yield
        finally:
            app.state.stopping.set()
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
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
    app.mount("/ui", StaticFiles(directory=Path(__file__).parent / "ui", html=True), name="ui")
    if chosen.tokens:
        _document_tokens(app)
    app.add_middleware(Observed)
    app.add_middleware(Guard, settings=chosen)  # added last, so outermost
    return app


async def _count_events(courier: Courier, metrics: Metrics) -> None:
    """What prefetches were worth, for the metrics."""
    while True:
        try:
            opened = await courier.events(["outcome", "finished"])
            async with opened.reader as reader:
                async for message in reader:
                    with contextlib.suppress(codec.DecodeError):
                        event = codec.decode(message.subject, message.headers, message.data)
                        metrics.events.labels(event.type).inc()
                        if isinstance(event, Outcome):
                            metrics.outcome(event)
        except BusError:
            await asyncio.sleep(_RETRY_S)


def _document_tokens(app: FastAPI) -> None:
    """Shows on the OpenAPI page that a token is needed."""
    plain = app.openapi

    def with_tokens() -> dict[str, object]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
        return schema

    app.openapi = with_tokens  # type: ignore[method-assign]
