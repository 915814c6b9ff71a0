# SPDX-License-Identifier: Apache-2.0
"""What ranks answer to anybody's command of this tenant, as it passes.

Answers are no events: they stand in a stream that keeps one message a subject, so they are followed live and never
resumed. A reader that is too slow loses the oldest, and is told how many. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from semkv.bus import codec
from semkv.bus.messages import Accepted, Result

__all__ = ["Answers"]

_KEPT = 1000
_FLUSH_S = 2


class Answers:
    """`async with Answers(nc, subject) as answers: answer = await answers.get()`"""

    def __init__(self, nc: Client, subject: str) -> None:
        self._nc = nc
        self._subject = subject
        self._kept: deque[Accepted | Result] = deque()
        self._some = asyncio.Event()
        self._sub: Subscription | None = None
        self.lost = 0
        """Dropped since it was last looked at and set to 0."""

    async def __aenter__(self) -> Answers:
        self._sub = await self._nc.subscribe(self._subject, cb=self._take)
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            await self._nc.flush(_FLUSH_S)  # from here on nothing is missed, unless NATS is away
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._sub is not None and not self._nc.is_closed:
            with contextlib.suppress(nats.errors.Error):
                await self._sub.unsubscribe()

    async def get(self) -> Accepted | Result:
        """The oldest that was not taken yet."""
        while not self._kept:
            self._some.clear()
            await self._some.wait()
        return self._kept.popleft()

    async def _take(self, message: Msg) -> None:
        with contextlib.suppress(codec.DecodeError):  # hostile, or of another version
            answer = codec.decode(message.subject, dict(message.headers or {}), message.data)
            if isinstance(answer, (Accepted, Result)):
                if len(self._kept) == _KEPT:
                    self._kept.popleft()
                    self.lost += 1
                self._kept.append(answer)
                self._some.set()
