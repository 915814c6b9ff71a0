# SPDX-License-Identifier: Apache-2.0
"""A rank's answers: published once, kept for a while, given again after a reconnect.

An answer that is lost with a broken connection or a crashed server would leave the agent waiting, so the newest answer
of each command is published again after every reconnect while it is young. It is byte for byte the same and has the
same `Nats-Msg-Id`. Answers leave in the order of `publish`, which never waits: one task writes them, and what is
published in one turn of the loop goes out together. `room` is where whoever makes answers waits for a slow link. One
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client

from semkv.bus import codec
from semkv.bus.messages import Accepted, Result
from semkv.bus.tasks import cancel_and_wait

log = logging.getLogger(__name__)

KEEP_S = 120.0
KEEP_MAX = 4096
SEEN_MAX = 65536
WAITING_MAX = 1024
# With tenants in accounts of their own, it is the agent's side that makes the results stream anew after a server lost
# its memory: later rounds reach it too.
AGAIN_AFTER_S = (0.0, 2.0, 6.0)


@dataclass(frozen=True)
class _Kept:
    payload: bytes
    headers: dict[str, str]
    at: float
    final: bool


class Answers:
    """Publishes `accepted` and `result`, and remembers which commands were taken."""

    def __init__(self) -> None:
        self._nc: Client | None = None
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._seen: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._waiting: deque[tuple[str, _Kept]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self.published = 0

    def start(self) -> None:
        """Starts the task that writes."""
        self._writer = asyncio.ensure_future(self._write())

    async def stop(self) -> None:
        """Ends it."""
        if self._writer is not None:
            await cancel_and_wait([self._writer])

    async def _write(self) -> None:
        while True:
            while self._waiting:
                try:
                    await self._send(*self._waiting.popleft())
                except Exception as error:  # one answer that cannot be sent must not hold up the others
                    log.warning("an answer could not be sent: %s", error)
            self._none.set()
            self._some.clear()
            await self._some.wait()

    def _put(self, subject: str, kept: _Kept) -> None:
        self._waiting.append((subject, kept))
        self._none.clear()
        self._some.set()

    async def written(self) -> None:
        """Waits until nothing waits to be written."""
        await self._none.wait()

    async def room(self) -> None:
        """Waits while more answers wait than a slow link can hold."""
        while len(self._waiting) > WAITING_MAX:
            await self._none.wait()

    def attach(self, nc: Client | None) -> None:
        """The connection to publish on from now."""
        self._nc = nc

    def take(self, tenant: str, command_id: str, subject: str) -> bool:
        """Whether a command is new in this epoch; it is remembered."""
        key = (tenant, command_id)
        if key in self._seen:
            return False
        self._seen[key] = subject
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return True

    def repeat(self, tenant: str, command_id: str) -> bool:
        """Publishes the result of a command that came again. False if it is not kept (any more, or yet)."""
        subject = self._seen.get((tenant, command_id), "")
        kept = self._kept.get(subject)
        if kept is None or not kept.final:
            return False
        self._put(subject, kept)
        return True

    def publish(self, answer: Accepted | Result, subject: str, headers: dict[str, str], *, json: bool) -> None:
        """Publishes an answer on its subject; without a connection it is kept for the next."""
        payload, own = codec.encode(answer, json=json)
        limit = self._nc.max_payload if self._nc is not None else 1 << 20
        if isinstance(answer, Result) and codec.wire_size(payload, {**own, **headers}) > limit:
            reason = f"{answer.reason or ''} (per-chunk statuses left out: over the server's message limit)".strip()
            answer = answer.model_copy(update={"chunk_status": (), "chunk_tiers": None, "reason": reason[:4096]})
            payload, own = codec.encode(answer, json=json)
        kept = _Kept(payload, {**own, **headers}, time.monotonic(), isinstance(answer, Result))
        self._kept[subject] = kept
        self._kept.move_to_end(subject)
        while len(self._kept) > KEEP_MAX:
            self._kept.popitem(last=False)
        self.published += 1
        self._put(subject, kept)

    async def _send(self, subject: str, kept: _Kept) -> None:
        # A connection that is down would only buffer it: it is sent after the reconnect instead.
        if self._nc is None or not self._nc.is_connected:
            return
        try:
            await self._nc.publish(subject, kept.payload, headers=kept.headers)
        except nats.errors.Error as error:
            log.debug("an answer waits for the next connection: %s", error)

    async def again(self, rounds: tuple[float, ...] = AGAIN_AFTER_S) -> None:
        """After a reconnect: the young answers once more."""
        waited = 0.0
        for after in rounds:
            await asyncio.sleep(after - waited)
            waited = after
            oldest = time.monotonic() - KEEP_S
            for subject, kept in list(self._kept.items()):
                if kept.at < oldest:
                    self._kept.pop(subject, None)
                else:
                    await self._send(subject, kept)
