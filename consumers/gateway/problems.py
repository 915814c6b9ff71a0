# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as answers: one shape, ``{"error": text, "field"?: name, "position"?: index}``.

Bad input is 400 with the field and, in a list, the position; nothing was executed. 401 no or wrong token, 403 force
without the right to it, 404, 405, 413 body too large, 429 too many requests or streams at once, 503 no engine or no
bus. Nothing that comes back carries a secret or a stack trace.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from semkv.bus.errors import BusError
from semkv.bus.hashes import HashError
from semkv.consumers.gateway.models import HASH_FORMS, HASH_PATTERN

__all__ = ["ProblemError", "bad_field", "install"]


class ProblemError(Exception):
    """An answer other than the wanted one."""

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.body = {"error": error, **{name: value for name, value in more.items() if value is not None}}


def bad_field(field: str, error: str, position: int | None = None) -> ProblemError:
    """400: this field of the body cannot be used."""
    return ProblemError(400, error, field=field, position=position)


def _answer(status: int, body: dict[str, Any]) -> JSONResponse:
    headers = (
        {"WWW-Authenticate": "Bearer"} if status == 401 else {"Retry-After": "1"} if status in {429, 503} else None
    )
    return JSONResponse(body, status, headers)


def install(app: FastAPI) -> None:
    """Makes the application answer in this shape."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return _answer(error.status, error.body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(400, _first(error))

    @app.exception_handler(HashError)
    async def bad_hash(_: Request, error: HashError) -> JSONResponse:
        return _answer(400, {"error": str(error), "field": "chunk_hashes", "position": error.position})

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        answer = _answer(error.status_code, {"error": str(error.detail)})
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        return answer

    @app.exception_handler(BusError)
    async def bus(_: Request, error: BusError) -> JSONResponse:
        return _answer(503, {"error": str(error)})


def _first(error: RequestValidationError) -> dict[str, Any]:
    """The first thing that is wrong, by field and position."""
    found = error.errors()[0]
    place = [part for part in found["loc"] if part != "body"]
    text = found["msg"]
    if found["type"] == "json_invalid":
        return {"error": f"the body is no JSON: {found.get('ctx', {}).get('error', text)}"}
    if isinstance(found.get("input"), bytes) and not place:
        return {"error": "the body is not sent as JSON: add the header Content-Type: application/json"}
    if found["type"] == "missing" and not place:
        return {"error": "the body is missing: send a JSON object"}
    if found["type"] == "string_pattern_mismatch" and found["ctx"]["pattern"] == HASH_PATTERN:
        text = f"expected {HASH_FORMS}"
    body: dict[str, Any] = {}
    names = [str(part) for part in place if isinstance(part, str)]
    # A path or query parameter's place begins with where it stands.
    if names and names[0] in {"query", "path", "header"}:
        names = names[1:]
    if names:
        body["field"] = names[0]
    position = next((part for part in place if isinstance(part, int)), None)
    if position is not None and names:
        body["position"] = position
    shown = repr(found.get("input"))
    shown = shown if len(shown) <= 40 else shown[:39] + "…"
    where = f"{names[0]}: " if names else "the body: "
    at = f"position {position}: " if "position" in body else ""
    given = "" if found["type"] == "missing" else f", got {shown}"
    return {"error": f"{where}{at}{text[:1].lower()}{text[1:]}{given}", **body}
