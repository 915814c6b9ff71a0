# SPDX-License-Identifier: Apache-2.0
"""What the metrics learn besides the answers: events as they come, and results that no caller waits for.

One asyncio loop. Nothing here raises to a caller; with NATS away it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from semkv.bus import codec
from semkv.bus.client.gaps import GapDetector
from semkv.bus.errors import BusError
from semkv.bus.messages import Finished, Heartbeat, Outcome
from semkv.consumers.gateway.courier import Courier, Ticket
from semkv.consumers.gateway.metrics import Metrics

__all__ = ["Later", "count_events"]

_RETRY_S = 1.0


class Later:
    """Counts commands whose callers did not wait, once they have ended or `wait_s` is over. `most` at a time."""

    def __init__(self, metrics: Metrics, wait_s: float, most: int) -> None:
        self._metrics = metrics
        self._wait_s = wait_s
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def count(self, ticket: Ticket, *, dry_run: bool) -> None:
        """Takes a command; beyond `most` it goes uncounted, rather than be counted as what it is not."""
        if len(self._tasks) >= self._most:
            return
        task = asyncio.create_task(self._count(ticket, dry_run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count(self, ticket: Ticket, dry_run: bool) -> None:
        with contextlib.suppress(BusError):
            self._metrics.report(await ticket.result(self._wait_s), dry_run=dry_run)

    async def close(self) -> None:
        """Forgets what has not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def count_events(courier: Courier, metrics: Metrics) -> None:
    """Events by type, what prefetches were worth, and finished events that were lost, until cancelled."""
    lost = GapDetector()
    after: int | None = None
    while True:
        try:
            opened = await courier.events(["outcome", "finished", "heartbeat"], after=after)
            async with opened.reader as reader:
                async for message in reader:
                    after = message.seq
                    with contextlib.suppress(codec.DecodeError):
                        _take(codec.decode(message.subject, message.headers, message.data), metrics, lost)
        except BusError:
            await asyncio.sleep(_RETRY_S)


def _take(event: Any, metrics: Metrics, lost: GapDetector) -> None:
    gap = None
    if isinstance(event, Heartbeat):
        gap = lost.heartbeat(event.instance, event.epoch, event.last_seq)
    else:
        metrics.events.labels(event.type).inc()
    if isinstance(event, Outcome):
        metrics.outcome(event)
    if isinstance(event, Finished):
        _, gap = lost.event(event.instance, event.epoch, event.seq, event.part, event.parts)
    if gap is not None:
        metrics.lost.labels(gap.instance).inc(gap.last - gap.first + 1)
