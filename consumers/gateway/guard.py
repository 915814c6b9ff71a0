# SPDX-License-Identifier: Apache-2.0
"""Who may call, how much they may send and how many at once: pure ASGI, before any route.

Tokens are compared in constant time against all of them. ``/healthz`` needs none, so that probes work, nor do the
page's own files. A body over the limit is refused by its declared length, or while it comes in when it declares none;
what stands after the limit is thrown away, and at 16 times the limit the connection is closed. Requests beyond the
limit are answered 429 at once: a queue would only hide the overload.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semkv.consumers.gateway.settings import GatewaySettings, Token

__all__ = ["Guard"]

_OPEN = {"/healthz", "/"}  # "/" leads to the page
_PAGE = "/ui"
"""The page's own files hold nothing; what it shows it asks for with a token."""
_STREAMS = {"/memory/events"}
_DRAIN = 16
_DRAIN_S = 2.0


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self.requests = 0
        self.streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        caller = self._caller(scope)
        if caller is None and path not in _OPEN and path != _PAGE and not path.startswith(f"{_PAGE}/"):
            wanted = "Authorization: Bearer TOKEN, with one of the gateway's SEMKV_GATEWAY_TOKENS_FILE"
            why = "this token is not known" if _header(scope, b"authorization") else "a bearer token is needed"
            await _refuse(send, 401, f"{why}: {wanted}", "www-authenticate", "Bearer")
            return
        scope.setdefault("state", {})["may_force"] = caller.force if caller else False
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._settings.body_limit:
            await _drain(receive, _DRAIN * self._settings.body_limit)
            await _refuse(send, 413, self._too_large(), "connection", "close")
            return
        stream = path in _STREAMS
        if (self.streams >= self._settings.streams) if stream else (self.requests >= self._settings.requests):
            await _refuse(
                send, 429, f"too many {'streams' if stream else 'requests'} at once: try again", "retry-after", "1"
            )
            return
        if stream:
            self.streams += 1
        else:
            self.requests += 1
        try:
            await self._limited(scope, receive, send)
        finally:
            if stream:
                self.streams -= 1
            else:
                self.requests -= 1

    def _caller(self, scope: Scope) -> Token | None:
        if not self._settings.tokens:
            return Token("local", "", self._settings.allow_force)
        scheme, _, shown = _header(scope, b"authorization").partition(" ")
        found = None
        for token in self._settings.tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(shown.strip().encode(), token.secret.encode()):
                found = token
        return found if scheme.lower() == "bearer" else None

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def limited_receive() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._settings.body_limit:
                    if message.get("more_body"):
                        await _drain(receive, _DRAIN * self._settings.body_limit)
                    # FastAPI reads the body and lets only its own kind of exception through as it is.
                    raise HTTPException(413, self._too_large(), {"Connection": "close"})
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> str:
        return f"the body is larger than {self._settings.body_limit} bytes: send fewer hashes at once"


async def _drain(receive: Receive, most: int) -> None:
    """Throws away what the caller is still sending: closing before it is read would reset the answer away."""
    taken = 0
    with contextlib.suppress(asyncio.TimeoutError):
        while taken <= most:
            message = await asyncio.wait_for(receive(), _DRAIN_S)
            taken += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return


def _header(scope: MutableMapping[str, Any], name: bytes) -> str:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return str(value.decode("latin-1"))
    return ""


async def _refuse(send: Send, status: int, error: str, header: str, value: str) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               (header.encode(), value.encode())]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
