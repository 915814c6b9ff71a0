# SPDX-License-Identifier: Apache-2.0
"""The stream of finished events, as an agent reads it: whole, once each, with losses told.

Parts are put together again, repetitions dropped, and the engines' sequence numbers checked: a hole is a `Gap`, told to
`on_gap` and kept in `gaps`, and never silently skipped. `last_seq` is where to resume (`kv.finished(after=...)`). A
reconnect, or a server restart, goes on where the stream was. One event loop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from semkv.bus import codec, subjects
from semkv.bus.client.gaps import Gap, GapDetector
from semkv.bus.clock import BrokerClock
from semkv.bus.errors import BusUnavailableError
from semkv.bus.messages import Finished, Heartbeat
from semkv.bus.reader import OrderedReader, StreamMessage
from semkv.bus.streams import EVENTS
from semkv.bus.tracing import CONSUMER, NullTracer, TraceContext, destination, extract, messaging_attributes

if TYPE_CHECKING:
    from semkv.bus.client.kv import KV

log = logging.getLogger(__name__)

_GAPS_KEPT = 1000
_PARTS_KEPT = 256


class FinishedStream:
    """An async iterator of `Finished`. `close()` ends it; so does leaving the client."""

    def __init__(
        self,
        kv: KV,
        *,
        session: str | None,
        instance: str | None,
        domain: str | None,
        since_ns: int | None,
        after: int | None,
        on_gap: Callable[[Gap], None] | None,
    ) -> None:
        self._kv = kv
        self._session = session
        self._instance = instance
        self._domain = domain
        # "From now on" is this instant, whenever the first event is asked for.
        self._clock = BrokerClock() if since_ns is None else None
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._on_gap = on_gap
        self._next_seq = None if after is None else after + 1
        self._detector = GapDetector()
        self._parts: OrderedDict[tuple[str, int, str, int], dict[int, Finished]] = OrderedDict()
        self._iterator: AsyncGenerator[Finished, None] | None = None
        self.last_seq = after or 0
        """Stream sequence of the newest event that was yielded: resume with `after=last_seq`."""
        self.gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self.dropped: Counter[str] = Counter()
        self.context: TraceContext | None = None
        """Trace context of the newest event."""

    def __aiter__(self) -> FinishedStream:
        return self

    async def __anext__(self) -> Finished:
        if self._iterator is None:
            self._iterator = self._run()
        return await self._iterator.__anext__()

    async def close(self) -> None:
        """Ends the stream."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            await iterator.aclose()

    async def _run(self) -> AsyncGenerator[Finished, None]:
        tenant = subjects.token(self._kv.tenant)
        where = subjects.token(self._instance) if self._instance else "*"
        filters = [
            f"{subjects.PREFIX}.{tenant}.{self._domain or '*'}.evt.{where}.{t}" for t in ("finished", "heartbeat")
        ]
        while not self._kv.closed:
            try:
                session = await self._kv.session()
            except BusUnavailableError:
                continue  # the stream waits as long as the client lives
            reader = OrderedReader(
                session.nc,
                session.link,
                EVENTS,
                filters,
                start_seq=self._next_seq,
                start_time_ns=self._since_ns,
                ensure=session.ensure,
                clock=self._clock,
            )
            async with reader:
                async for message in reader:
                    self._next_seq = message.seq + 1
                    event = self._take(message)
                    if event is not None:
                        self.last_seq = message.seq
                        yield event

    def _take(self, message: StreamMessage) -> Finished | None:
        try:
            event = codec.decode(message.subject, message.headers, message.data)
        except codec.DecodeError as error:
            self.dropped[error.kind] += 1
            if self.dropped[error.kind] == 1:
                log.warning("an event was dropped (more of this kind are only counted): %s", str(error)[:300])
            return None
        if isinstance(event, Heartbeat):
            self._told(self._detector.heartbeat(event.instance, event.epoch, event.last_seq))
            return None
        if not isinstance(event, Finished):
            return None
        new, gap = self._detector.event(event.instance, event.epoch, event.seq, event.part, event.parts)
        self._told(gap)
        if not new:
            return None
        whole = self._whole(event)
        if whole is None or (self._session is not None and whole.session != self._session):
            return None
        self.context = extract(message.headers)
        self._record(self._kv.tracer, whole, message)
        return whole

    def _told(self, gap: Gap | None) -> None:
        if gap is not None:
            self.gaps.append(gap)
            if self._on_gap is not None:
                self._on_gap(gap)

    def _whole(self, event: Finished) -> Finished | None:
        if event.parts == 1:
            return event
        key = (event.instance, event.epoch, event.engine_request_id, event.index)
        parts = self._parts.setdefault(key, {})
        parts[event.part] = event
        if len(parts) < event.parts:
            if len(self._parts) > _PARTS_KEPT:
                self._parts.popitem(last=False)
            return None
        del self._parts[key]
        hashes = tuple(h for number in sorted(parts) for h in parts[number].chunk_hashes)
        return event.model_copy(update={"chunk_hashes": hashes, "part": 1, "parts": 1})

    def _record(self, tracer: NullTracer, event: Finished, message: StreamMessage) -> None:
        """A fan-out subscriber starts a trace of its own, linked to the event's."""
        if not tracer.enabled:
            return
        template = destination("evt", "finished")
        with tracer.span(
            f"process {template}",
            kind=CONSUMER,
            links=[self.context] if self.context is not None else [],
            attributes=messaging_attributes("process", message.subject, template, size=len(message.data)),
        ) as span:
            span.put({"kv.request_id": event.request_id, "kv.instance": event.instance, "kv.domain": event.domain})
            span.put({"kv.chunks.requested": len(event.chunk_hashes)})
            if event.session:
                span.put({"kv.session_id": event.session})
