# SPDX-License-Identifier: Apache-2.0
"""One span, one count and one time per request: pure ASGI, so that streams stay streams.

What a request asks of the bus continues the caller's trace: ``state["traceparent"]``. A fault of ours is answered 500
without details and logged with its trace.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semkv.bus.tracing import extract
from semkv.consumers.gateway.courier import Courier
from semkv.consumers.gateway.metrics import Metrics

__all__ = ["Observed"]

log = logging.getLogger(__name__)


class Observed:
    """Inside the guard, around the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: Any = scope["app"].state
        courier: Courier = state.courier
        metrics: Metrics = state.metrics
        began = time.perf_counter()
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        name = f"{scope['method']} {scope['path'][:64]}"
        with courier.tracer.span(name, parent=extract(Headers(scope=scope))) as span:
            scope["state"]["traceparent"] = span.context.traceparent if span.context is not None else None
            try:
                await self._app(scope, receive, noting_send)
            except Exception:
                if status:
                    raise
                log.exception("%s failed", name)
                status = 500
                await _fault(send)
            span.put({"http.request.method": scope["method"], "http.response.status_code": status})
        route = getattr(scope.get("route"), "path", "other")
        metrics.requests.labels(route, str(status)).inc()
        metrics.seconds.labels(route).observe(time.perf_counter() - began)


async def _fault(send: Send) -> None:
    body = json.dumps({"error": "a fault inside the gateway; its log says which"}).encode()
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
