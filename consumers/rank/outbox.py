# SPDX-License-Identifier: Apache-2.0
"""A rank's own events on the worker's connection: `outcome.v1`, and the trace it belongs to.

`offer` may be called from any thread, the engine's too: it appends to a bounded queue and wakes the worker's loop. What
is offered while NATS is away waits for the next connection; beyond `LIMIT` the oldest are dropped and counted. A plain
publish that is lost with a dying connection is not repeated: an outcome is a statistic, not an answer.
`CommandTraces` remembers where recent commands are in their traces, for spans that link to them; any thread.
Errors: none reach the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, OrderedDict, deque
from typing import NamedTuple

import nats.errors
from nats.aio.client import Client

from semkv.bus import codec
from semkv.bus.messages import Outcome
from semkv.bus.steps import Attribute
from semkv.bus.tracing import PRODUCER, NullTracer, TraceContext, destination, inject, messaging_attributes

log = logging.getLogger(__name__)

LIMIT = 1024
TRACES = 4096
FATES = ("useful", "redundant", "late", "wasted")


class _Waiting(NamedTuple):
    outcome: Outcome
    context: TraceContext | None


class Outbox:
    """Publishes outcomes in the order they were offered."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._nc: Client | None = None
        self._tracer = NullTracer()
        self.dropped = 0
        self.worth: Counter[str] = Counter()
        """Chunks of all outcomes so far, by what they were worth."""

    def offer(self, outcome: Outcome, context: TraceContext | None = None) -> None:
        """Publish this when there is a connection; `context` is the command's place in its trace."""
        for fate in FATES:
            self.worth[fate] += getattr(outcome, fate)
        if len(self._waiting) >= LIMIT:
            with contextlib.suppress(IndexError):
                self._waiting.popleft()
                self.dropped += 1
        self._waiting.append(_Waiting(outcome, context))
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the worker has just ended
                loop.call_soon_threadsafe(self._wake.set)

    def attach(self, nc: Client | None) -> None:
        """The connection to publish on from now; called again after each reconnect."""
        self._nc = nc
        self._wake.set()

    async def run(self, tracer: NullTracer) -> None:
        """Publishes until cancelled; belongs to the worker's loop."""
        self._loop, self._tracer = asyncio.get_running_loop(), tracer
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.drain()

    async def drain(self) -> None:
        """Publishes what waits, if there is a connection."""
        while self._waiting and self._nc is not None and self._nc.is_connected:
            waiting = self._waiting.popleft()
            try:
                await self._publish(self._nc, waiting.outcome, waiting.context)
            except nats.errors.Error as error:
                log.debug("an outcome waits for the next connection: %s", error)
                self._waiting.appendleft(waiting)
                return
            except Exception:
                log.exception("an outcome could not be published")

    async def _publish(self, nc: Client, outcome: Outcome, context: TraceContext | None) -> None:
        where = codec.subject_of(outcome)
        payload, headers = codec.encode(outcome)
        sending = self._tracer.start(
            f"publish {destination('evt', outcome.type)}",
            kind=PRODUCER,
            parent=context,
            attributes=messaging_attributes("publish", where, destination("evt", outcome.type), size=len(payload)),
        )
        sending.put(_about(outcome))
        inject(headers, sending.context)
        await nc.publish(where, payload, headers=headers)
        self._tracer.end(sending)


def _about(outcome: Outcome) -> dict[str, Attribute]:
    return {
        "kv.command_id": outcome.command_id,
        "kv.domain": outcome.domain,
        "kv.instance": outcome.instance,
        "kv.rank": outcome.rank,
        "kv.bytes": outcome.bytes,
        **{f"kv.chunks.{fate}": getattr(outcome, fate) for fate in FATES},
    }


class CommandTraces:
    """Where the newest commands are in their traces, by the name that their chunks go by."""

    def __init__(self, limit: int = TRACES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str, TraceContext] = OrderedDict()

    def keep(self, name: str, context: TraceContext | None) -> None:
        """Remember a command's span; a later one of the same command takes its place."""
        if context is None:
            return
        with self._lock:
            self._contexts[name] = context
            self._contexts.move_to_end(name)
            if len(self._contexts) > self._limit:
                self._contexts.popitem(last=False)

    def get(self, name: str) -> TraceContext | None:
        """The command's span, if it is still remembered."""
        with self._lock:
            return self._contexts.get(name)
