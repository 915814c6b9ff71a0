# SPDX-License-Identifier: Apache-2.0
"""``GET /memory/events``: what happens, as server-sent events, with resume.

`finished`, `outcome` and `heartbeat` come from the engines' stream: each has its stream sequence as ``id``; a client
that comes back with ``Last-Event-ID`` (or ``?after=``) goes on there, and what the stream no longer keeps is told by
one ``gap`` event. `accepted` and `result`, the ranks' answers to anybody's commands, `engines`, who is live and how
full their tiers are, and `bus`, whether NATS is reached, are live only: they have no id. ``ready`` comes first, with
the position. A comment every 15 s keeps the connection alive; a slow reader holds the stream back and loses no event of
it; of the answers it loses the oldest, told by ``lost``. It ends when the reader goes, or the gateway stops.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from semkv.bus import codec
from semkv.bus.fields import JSON, WIRE
from semkv.bus.messages import Message
from semkv.bus.reader import StreamMessage
from semkv.consumers.gateway.courier import Courier, Events
from semkv.consumers.gateway.following import Answers
from semkv.consumers.gateway.metrics import Metrics
from semkv.consumers.gateway.models import Name
from semkv.consumers.gateway.problems import bad_field
from semkv.consumers.gateway.routes.commands import PROBLEMS

__all__ = ["router"]

_ALIVE_S = 15.0
_LOOK_S = 0.5
_ANSWERS = ("accepted", "result")
_PER_CHUNK = {"chunk_status", "chunk_tiers", "hash_domain"}
"""Of an answer: as long as its command, and of no use without the command's hashes."""

router = APIRouter(prefix="/memory")

Kind = Literal["finished", "outcome", "heartbeat", "accepted", "result", "engines", "bus"]


@router.get(
    "/events", response_class=StreamingResponse,
    responses={**PROBLEMS, 200: {"content": {"text/event-stream": {}}, "description": "Events until the reader goes"}},
)  # fmt: skip
async def events(
    request: Request,
    type: Annotated[list[Kind] | None, Query()] = None,
    session: Annotated[Name | None, Query(description="Only finished requests of this session.")] = None,
    instance: Annotated[Name | None, Query(description="Only what is of this engine.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="Only events after this id.")] = None,
    last: Annotated[int | None, Query(ge=0, le=10_000, description="Begin with this many older events.")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Finished requests and outcomes as they happen; if asked for, the ranks' answers and the engines' tiers."""
    courier: Courier = request.app.state.courier
    if last_event_id:
        if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 15:
            raise bad_field("Last-Event-ID", f"Last-Event-ID: {last_event_id!r:.40} is no id of an event")
        after = int(last_event_id)
    kinds: list[str] = list(dict.fromkeys(type or ["finished", "outcome"]))
    stored = [kind for kind in kinds if kind not in (*_ANSWERS, "engines", "bus")]
    opened = await courier.events(stored or ["none"], instance=instance, after=after, last=last)
    answers = await courier.answers(instance) if set(kinds) & set(_ANSWERS) else None
    stream = _Stream(opened, answers, courier, kinds, session, instance)
    body = stream.run(request.app.state.metrics, request.app.state.stopping)
    return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class _Stream:
    """One reader's stream: waits on all its sources at once, one message of each in flight."""

    def __init__(
        self,
        opened: Events,
        answers: Answers | None,
        courier: Courier,
        kinds: list[str],
        session: str | None,
        instance: str | None,
    ) -> None:
        self._opened = opened
        self._answers = answers
        self._courier = courier
        self._kinds = set(kinds)
        self._session = session
        self._instance = instance
        self._shown: list[dict[str, Any]] | None = None
        self._reached: bool | None = None

    async def run(self, metrics: Metrics, stopping: asyncio.Event) -> AsyncIterator[bytes]:
        metrics.streams.inc()
        pending: dict[asyncio.Future[Any], str] = {}

        def give_up() -> None:
            for future in pending:
                future.cancel()

        try:
            async with AsyncExitStack() as stack:
                reader = await stack.enter_async_context(self._opened.reader)
                sources: dict[str, Callable[[], Awaitable[Any]]] = {"stop": stopping.wait, "event": reader.__anext__}
                if self._answers is not None:
                    sources["answer"] = (await stack.enter_async_context(self._answers)).get
                if "engines" in self._kinds:
                    sources["engines"] = self._changed_engines
                if "bus" in self._kinds:
                    sources["bus"] = self._changed_bus
                await reader.ready()
                yield _event("ready", self._opened.position, {"after": self._opened.position})
                if self._opened.lost is not None:
                    first, last = self._opened.lost
                    yield _event("gap", self._opened.position, {"first": first, "last": last})
                stack.callback(give_up)
                pending.update({asyncio.ensure_future(start()): name for name, start in sources.items()})
                while True:
                    done, _ = await asyncio.wait(pending, timeout=_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        yield b": alive\n\n"
                    for future in done:
                        name = pending.pop(future)
                        if name == "stop":
                            return
                        try:
                            told = self._told(name, future.result())
                        except StopAsyncIteration:
                            return
                        for block in told:
                            yield block
                        pending[asyncio.ensure_future(sources[name]())] = name
        finally:
            metrics.streams.dec()

    def _told(self, source: str, found: Any) -> list[bytes]:
        """What a reader is told of one thing that a source gave; nothing of what was not asked for."""
        if source in {"engines", "bus"}:
            return [_event(source, None, found)]
        if source == "event":
            return self._told_event(found)
        told = []
        assert self._answers is not None
        if self._answers.lost:
            told.append(_event("lost", None, {"answers": self._answers.lost}))
            self._answers.lost = 0
        if found.type in self._kinds:
            told.append(_event(found.type, None, _fields(found, exclude=_PER_CHUNK)))
        return told

    def _told_event(self, message: StreamMessage) -> list[bytes]:
        try:
            event = codec.decode(message.subject, message.headers, message.data)
        except codec.DecodeError:
            return []  # hostile or of another version: counted where events are counted
        if self._session is not None and getattr(event, "session", self._session) != self._session:
            return []
        return [_event(event.type, message.seq, _fields(event))]

    async def _changed_engines(self) -> dict[str, Any]:
        """The live ranks, once they are others, or otherwise full, than was last told."""
        while True:
            now = [_fields(info) for info in self._courier.live() if self._instance in (None, info.instance)]
            if now != self._shown:
                self._shown = now
                return {"engines": now}
            await asyncio.sleep(_LOOK_S)

    async def _changed_bus(self) -> dict[str, Any]:
        """Whether NATS is reached, once that is otherwise than was last told."""
        while True:
            now = self._courier.connected
            if now is not self._reached:
                self._reached = now
                return {"connected": now}
            await asyncio.sleep(_LOOK_S)


def _fields(message: Message, exclude: set[str] | None = None) -> dict[str, Any]:
    return message.model_dump(mode="json", exclude_none=True, exclude=exclude, context={WIRE: JSON})


def _event(name: str, seq: int | None, data: dict[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    place = "" if seq is None else f"id: {seq}\n"
    return f"{place}event: {name}\ndata: {text}\n\n".encode()
