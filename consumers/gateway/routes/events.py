# SPDX-License-Identifier: Apache-2.0
"""``GET /memory/events``: the engines' events as server-sent events, with resume.

Each has its stream sequence as ``id``; a client that comes back with ``Last-Event-ID`` (or ``?after=``) goes on there,
and what the stream no longer keeps is told by one ``gap`` event. ``ready`` comes first, with the position. A comment
every 15 s keeps the connection alive; a slow reader holds the stream back and loses nothing. It ends when the reader
goes, or the gateway stops.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from semkv.bus import codec
from semkv.bus.fields import JSON, WIRE
from semkv.consumers.gateway.courier import Courier, Events
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.models import Name
from semkv.consumers.gateway.problems import bad_field
from semkv.consumers.gateway.routes.commands import PROBLEMS

__all__ = ["router"]

_ALIVE_S = 15.0

router = APIRouter(prefix="/memory")


@router.get(
    "/events", response_class=StreamingResponse,
    responses={**PROBLEMS, 200: {"content": {"text/event-stream": {}}, "description": "Events until the reader goes"}},
)  # fmt: skip
async def events(
    request: Request,
    type: Annotated[list[Literal["finished", "outcome", "heartbeat"]] | None, Query()] = None,
    session: Annotated[Name | None, Query(description="Only events of this session.")] = None,
    instance: Annotated[Name | None, Query(description="Only events of this engine.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="Only events after this id.")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Finished requests and outcomes as they happen."""
    courier: Courier = request.app.state.courier
    if last_event_id:
        if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 15:
            raise bad_field("Last-Event-ID", f"Last-Event-ID: {last_event_id!r:.40} is no id of an event")
        after = int(last_event_id)
    kinds = type or ["finished", "outcome"]
    opened = await courier.events(kinds, instance=instance, after=after)
    stream = _stream(opened, session, request.app.state.metrics, request.app.state.stopping)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _stream(
    opened: Events, session: str | None, metrics: Metrics, stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    metrics.streams.inc()
    stop = asyncio.ensure_future(stopping.wait())
    try:
        async with opened.reader as reader:
            await reader.ready()
            yield _event("ready", opened.position, {"after": opened.position})
            if opened.lost is not None:
                yield _event("gap", opened.position, {"first": opened.lost[0], "last": opened.lost[1]})
            following = asyncio.ensure_future(reader.__anext__())
            try:
                while True:
                    await asyncio.wait({following, stop}, timeout=_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if stop.done():
                        return
                    if not following.done():
                        yield b": alive\n\n"
                        continue
                    message = following.result()
                    following = asyncio.ensure_future(reader.__anext__())
                    try:
                        event = codec.decode(message.subject, message.headers, message.data)
                    except codec.DecodeError:
                        continue  # hostile or of another version: counted where events are counted
                    if session is not None and getattr(event, "session", session) != session:
                        continue
                    fields = event.model_dump(mode="json", exclude_none=True, context={WIRE: JSON})
                    yield _event(event.type, message.seq, fields)
            finally:
                following.cancel()
    finally:
        stop.cancel()
        metrics.streams.dec()


def _event(name: str, seq: int, data: dict[str, object]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"id: {seq}\nevent: {name}\ndata: {text}\n\n".encode()
