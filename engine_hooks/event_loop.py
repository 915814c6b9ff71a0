# SPDX-License-Identifier: Apache-2.0
"""What the publisher's thread runs: connect, learn what the ranks announced, publish, repeat.

Nothing here is seen by the scheduler but `Agreement.state`. Events wait in the ring while NATS is away or while the
ranks of this instance have not announced themselves yet; a batch is over when the server has answered behind it. A
server that goes down may have answered without having stored, so what was sent in the last two seconds before is sent
again after a reconnect, under the seq it had and with a message id by which the events stream knows it.

Threads: one loop, the publisher's. Errors: a lost connection is waited for; anything else passes to the publisher,
which logs it once and starts this loop over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from typing import Any

import nats.errors

from semkv.bus import codec, subjects
from semkv.bus.connection import Link, connect_nats
from semkv.bus.errors import BusError, BusUnavailableError
from semkv.bus.messages.base import TenantMessage
from semkv.bus.messages.finished import Finished
from semkv.bus.messages.heartbeat import Heartbeat
from semkv.bus.metrics import EVENTS, EVENTS_DROPPED, EVENTS_WAITING, RESTARTS, NullMetrics, setup_metrics
from semkv.bus.settings import BusSettings
from semkv.bus.status import HashesStatus
from semkv.bus.steps import Attribute
from semkv.bus.tracing import (
    PRODUCER,
    NullTracer,
    TraceContext,
    destination,
    inject,
    messaging_attributes,
    setup_tracing,
)
from semkv.engine_hooks import finished
from semkv.engine_hooks.agreement import Agreement, AgreementState
from semkv.engine_hooks.announced import Announced
from semkv.engine_hooks.finished import FinishedNote
from semkv.engine_hooks.publisher import EventPublisher

_log = logging.getLogger("semkv.engine_hooks")

BATCH = 256
HEARTBEAT_S = 2.0
SETTLE_S = 6.0
"""How long events wait for ranks that have not announced themselves (they do so every 2 s)."""
FLUSH_S = 3.0
DRAIN_S = 0.9
YIELD_S = 0.0002
"""How long events are written before the scheduler's thread may have its turn."""
RECENT_S = 2.0
RECENT_NOTES = 2048
HEADROOM = 8192


class EventLoop:
    """One engine's event publishing. `run` is the EventPublisher's runner."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        instance: str,
        domain: str,
        chunk_size: int,
        agreement: Agreement | None,
        suffixed: bool = True,
    ) -> None:
        self.settings = settings
        self.instance = instance
        self.domain = domain
        self.chunk_size = chunk_size
        self.agreement = agreement
        self.suffixed = suffixed
        self._link = Link()
        self._tracer = NullTracer()
        self._unsent: list[FinishedNote] = []
        self._recent: deque[tuple[float, FinishedNote]] = deque(maxlen=RECENT_NOTES)
        self._back = False
        self._pid = os.getpid()
        self._next_beat = 0.0
        self._dropped_said = 0
        self._waiting_since: float | None = None

    async def run(self, publisher: EventPublisher) -> None:
        """Publish until the publisher is closed."""
        if self._pid != os.getpid():
            # Forked: what was sent or is to be sent again is the parent's.
            self._pid, self._dropped_said = os.getpid(), 0
            self._unsent.clear()
            self._recent.clear()
        self._link = Link()
        self._link.on_reconnect.append(self._came_back)
        self._tracer = setup_tracing("semkv-engine")
        metrics = setup_metrics("semkv-engine", {"kv.instance": self.instance})
        _watch(metrics, publisher)
        try:
            connection = await self._connect(publisher)
            if connection is not None:
                self._came_back()
                await self._use(connection, publisher)
        finally:
            with contextlib.suppress(Exception):
                self._tracer.shutdown()
            metrics.shutdown()

    async def _use(self, connection: Any, publisher: EventPublisher) -> None:
        try:
            async with Announced(connection, self._link, self.instance, self.agreement):
                await self._serve(connection, publisher)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.close(), 1.0)

    def _came_back(self) -> None:
        self._back = True

    async def _connect(self, publisher: EventPublisher) -> Any:
        while not publisher.closing:
            try:
                return await connect_nats(
                    self.settings, name=f"semkv-events-{self.instance}"[:200], link=self._link, timeout=1.0
                )
            except BusUnavailableError as error:
                publisher.complain("connecting (trying on)", error)
            except BusError as error:
                # Refused credentials or an old server: said once, tried again, since an operator may mend it.
                publisher.complain("connecting", error)
                await publisher.pause(10.0)
        return None

    async def _serve(self, connection: Any, publisher: EventPublisher) -> None:
        while not publisher.closing:
            await publisher.wait(self._until_beat())
            if publisher.closing:
                break
            if connection.is_closed:
                raise ConnectionError("the NATS client has given up this connection")
            if not connection.is_connected or not self._settled(publisher):
                await publisher.pause(0.05)
                continue
            await self._publish(connection, publisher)
        deadline = time.monotonic() + DRAIN_S
        while (self._unsent or publisher.backlog()) and connection.is_connected and time.monotonic() < deadline:
            if not await self._publish(connection, publisher):
                break

    def _settled(self, publisher: EventPublisher) -> bool:
        """Whether it is time to judge what is in the ring: the ranks are known, or have been waited for long enough."""
        agreement = self.agreement
        if agreement is None or agreement.state is not AgreementState.WAITING:
            self._waiting_since = None
            return True
        if not publisher.backlog() and not self._unsent:
            return True
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since >= SETTLE_S

    async def _publish(self, connection: Any, publisher: EventPublisher) -> bool:
        """Send a batch and what heartbeat is due. False if the server did not answer."""
        if self._back:
            self._back = False
            if self._recent:
                last = self._recent[-1][0]
                self._unsent = [note for at, note in self._recent if at >= last - RECENT_S] + self._unsent
                self._recent.clear()
        batch = self._unsent or publisher.take(BATCH)
        self._unsent = batch
        turn = time.monotonic()
        for note in batch:
            self._judge(note)
            try:
                await self._send(connection, note)
                if time.monotonic() - turn > YIELD_S:
                    # A look at the loop's sockets lets go of the interpreter: without it the scheduler's thread would
                    # wait for the whole batch, 5 ms at a time.
                    await asyncio.sleep(0)
                    turn = time.monotonic()
            except (OSError, nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as error:
                publisher.complain("sending (the batch is sent again)", error)
                return False
            except Exception as error:  # one event that cannot be written is lost, and its `seq` shows it
                publisher.complain("an event that cannot be written", error)
        await self._beat(connection, publisher)
        try:
            await connection.flush(FLUSH_S)
        except Exception as error:
            publisher.complain("no answer from NATS (the batch is sent again)", error)
            return False
        self._unsent = []
        now = time.monotonic()
        self._recent.extend((now, note) for note in batch)
        publisher.published += len(batch)
        if publisher.dropped > self._dropped_said:
            _log.warning(
                "semkv: %d finished events were dropped while NATS was away (SEMKV_EVENT_RING holds more)",
                publisher.dropped - self._dropped_said,
            )
            self._dropped_said = publisher.dropped
        return True

    def _judge(self, note: FinishedNote) -> None:
        agreement = self.agreement
        if note.status is not HashesStatus.KNOWN or agreement is None:
            return
        if agreement.state is not AgreementState.AGREED:
            note.status = HashesStatus.UNSTABLE
            note.reason = agreement.reason[:1024]

    async def _send(self, connection: Any, note: FinishedNote) -> None:
        room = max(1, (int(connection.max_payload or 1 << 20) - HEADROOM) // 8)
        context = self._record_spans(note)
        for message in finished.messages(
            note,
            domain=self.domain,
            instance=self.instance,
            epoch=note.epoch,
            chunk_size=self.chunk_size,
            suffixed=self.suffixed,
            per_part=min(room, 32768),
        ):
            await self._put(connection, message, context)

    def _record_spans(self, note: FinishedNote) -> TraceContext | None:
        """The request's spans, from the times its note holds; the context that the event carries on."""
        context = TraceContext(note.traceparent, note.tracestate or "") if note.traceparent else None
        if not self._tracer.enabled:
            return context
        about: dict[str, Attribute] = {
            "kv.request_id": note.engine_request_id[:256],
            "kv.instance": self.instance,
            "kv.domain": self.domain,
            "kv.chunks.total": len(note.texts),
            "kv.outcome": note.finish_reason,
        }
        if note.session is not None:
            about["kv.session_id"] = note.session
        if note.lookup_ns and note.answered_ns:
            hits: dict[str, Attribute] = {} if note.hit_tokens is None else {"kv.hit_tokens": note.hit_tokens}
            self._tracer.record("kv.lookup", note.lookup_ns, note.answered_ns, parent=context, attributes=about | hits)
        return self._tracer.record("kv.finished", note.finished_at, time.time_ns(), parent=context, attributes=about)

    async def _put(self, connection: Any, message: TenantMessage, context: TraceContext | None = None) -> None:
        payload, headers = codec.encode(message, json=self.settings.event_format == "json")
        if isinstance(message, Finished):
            who = f"{subjects.token(message.tenant)}.{subjects.token(message.instance)}"
            headers[codec.MSG_ID] = f"{who}.{message.epoch}.{message.seq}.{message.part}"
        subject = subjects.event(message.tenant, message.domain, message.instance, message.type)
        if context is None:
            await connection.publish(subject, payload, headers=headers)
            return
        template = destination("evt", message.type)
        with self._tracer.span(
            f"publish {template}",
            kind=PRODUCER,
            parent=context,
            attributes=messaging_attributes("publish", subject, template, size=len(payload)),
        ) as span:
            inject(headers, span.context)
            await connection.publish(subject, payload, headers=headers)

    # ---- heartbeat

    def _until_beat(self) -> float:
        return max(0.0, min(HEARTBEAT_S, self._next_beat - time.monotonic()))

    async def _beat(self, connection: Any, publisher: EventPublisher) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_S
        for tenant, last in publisher.last_seqs().items():
            message = Heartbeat(
                tenant=tenant, domain=self.domain, instance=self.instance, epoch=publisher.epoch, last_seq=last
            )
            await self._put(connection, message)


def _watch(metrics: NullMetrics, publisher: EventPublisher) -> None:
    """What the publisher counts anyway, read when it is exported."""
    metrics.watch(EVENTS, lambda: [(publisher.published, {})])
    metrics.watch(EVENTS_DROPPED, lambda: [(publisher.dropped, {})])
    metrics.watch(EVENTS_WAITING, lambda: [(publisher.backlog(), {})])
    metrics.watch(RESTARTS, lambda: [(publisher.restarts, {})])
