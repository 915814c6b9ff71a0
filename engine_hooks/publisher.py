# SPDX-License-Identifier: Apache-2.0
"""EventPublisher: takes finished requests from the scheduler's thread and publishes them, whatever happens to NATS.

`offer` appends to a bounded ring and returns; it wakes the publisher only if that is asleep. One daemon thread with its
own loop and its own connection does the rest. While NATS is away the ring keeps the newest events; what it drops shows
as a gap in `seq`. A batch counts as sent when the server has answered behind it; else it is sent again under the same
seq.

Threads: `offer` is called by one thread (the scheduler's), `start` and `close` by any. Fork: a child that inherits a
publisher starts its own thread at its first event. A process that ends without `close` closes it on its way out.
Errors: `offer`, `start` and `close` never raise. What goes wrong in the thread is logged once per kind and counted, and
the thread starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from multiprocessing import util as process_end

from semkv.engine_hooks.finished import FinishedNote

_log = logging.getLogger("semkv.engine_hooks")

MAX_TENANTS = 4096
RESTART_S = 1.0
POLL_S = 0.005
LINGER_POLLS = 20

Runner = Callable[["EventPublisher"], Awaitable[None]]
"""The coroutine that runs in the thread: connects, takes from the ring, publishes. Returns when told to stop."""


class EventPublisher:
    """The ring and the thread. `runner` is what the thread runs (`semkv.engine_hooks.event_loop`)."""

    def __init__(
        self, runner: Runner, *, ring: int = 8192, tenant: str = "default", name: str = "semkv-events"
    ) -> None:
        self._runner = runner
        self._ring: deque[FinishedNote] = deque(maxlen=ring)
        self._name = name
        self._tenant = tenant
        self._seq: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stop: asyncio.Event | None = None
        self._asleep = False
        self._closing = False
        self._said: set[str] = set()
        self._start_lock = threading.Lock()
        self._at_end: process_end.Finalize | None = None
        self.epoch = time.time_ns()
        self.dropped = 0
        self.restarts = 0
        self.published = 0

    # ---- the scheduler's side

    def offer(self, note: FinishedNote) -> None:
        """Take one finished request. Never blocks, never raises."""
        try:
            if self._pid != os.getpid():
                self.start()
            tenant = note.tenant
            last = self._seq.get(tenant)
            if last is None:
                if len(self._seq) >= MAX_TENANTS:
                    tenant = note.tenant = self._tenant
                last = self._seq.get(tenant, 0)
            note.seq = self._seq[tenant] = last + 1
            note.epoch = self.epoch
            self._ring.append(note)
            if self._asleep:
                self._asleep = False
                self._rouse()
        except Exception as error:
            self.complain("offer", error)

    def _rouse(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.start()
            return
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:  # the loop is being closed: the thread starts over and looks at the ring first
                return

    # ---- life

    def start(self) -> None:
        """Start the thread in this process if it does not run already."""
        if not self._start_lock.acquire(blocking=False):
            return  # another thread is at it, or was when this process was forked: the next event tries again
        try:
            self._start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            self.complain("start", error)
        finally:
            self._start_lock.release()

    def _start(self) -> None:
        if self._closing or (self._pid == os.getpid() and self.alive):
            return
        if self._pid not in (0, os.getpid()):
            # Forked: the parent goes on publishing what is in the ring, under its own epoch.
            self.epoch = time.time_ns()
            self._ring.clear()
            self._seq.clear()
            self._taken.clear()
            self.dropped = self.published = self.restarts = 0
        self._pid = os.getpid()
        self._loop = self._wake = self._stop = None
        self._asleep = False
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        # A daemon thread ends in mid-sentence with its process, and a multiprocessing child leaves out `atexit`.
        self._at_end = process_end.Finalize(None, self.close, args=(1.0,), exitpriority=10)

    def close(self, timeout: float = 1.0) -> None:
        """Publish what is left, for at most `timeout` seconds, and end the thread. A second call does nothing."""
        self._closing = True
        thread, loop = self._thread, self._loop
        if self._at_end is not None:
            self._at_end.cancel()
        if thread is None or self._pid != os.getpid() or thread is threading.current_thread():
            return
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(self._tell_closing)
        thread.join(timeout)

    def _tell_closing(self) -> None:
        for event in (self._wake, self._stop):
            if event is not None:
                event.set()

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # ---- the thread's side

    def take(self, limit: int) -> list[FinishedNote]:
        """Up to `limit` notes, oldest first."""
        taken: list[FinishedNote] = []
        ring = self._ring
        with contextlib.suppress(IndexError):
            while len(taken) < limit:
                note = ring.popleft()
                # What the ring dropped shows here, as it will to whoever reads the events.
                self.dropped += note.seq - self._taken.get(note.tenant, 0) - 1
                self._taken[note.tenant] = note.seq
                taken.append(note)
        return taken

    def backlog(self) -> int:
        return len(self._ring)

    def last_seqs(self) -> dict[str, int]:
        """The newest seq of each tenant."""
        return dict(self._seq)

    async def wait(self, timeout: float) -> None:
        """Return when there is something to take, when closing, or after `timeout` seconds.

        Right after work it looks again every 5 ms instead of sleeping, so that a busy scheduler never pays for a
        wake-up; when nothing has come for a while it sleeps and the next event wakes it.
        """
        deadline = time.monotonic() + timeout
        for _ in range(LINGER_POLLS):
            if self._ring or self._closing or time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL_S)
        wake = self._wake
        if wake is None:
            return
        wake.clear()
        self._asleep = True
        if not self._ring and not self._closing:  # looked at again after `_asleep`: what came between is not missed
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wake.wait(), max(0.0, deadline - time.monotonic()))
        self._asleep = False

    async def pause(self, seconds: float) -> None:
        """Sleep, but not past the wish to close."""
        stop = self._stop
        if stop is not None and not self._closing:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)

    def complain(self, kind: str, error: BaseException) -> None:
        """One line per kind of trouble and process."""
        try:
            if kind not in self._said:
                self._said.add(kind)
                _log.warning("semkv: event publisher, %s: %s: %s", kind, type(error).__name__, error)
        except Exception:  # a broken log handler must not reach the engine either
            return

    def _main(self) -> None:
        while True:
            try:
                asyncio.run(self._run())
                return
            except BaseException as error:
                self.complain(f"thread ({type(error).__name__})", error)
            if self._closing:
                return
            self.restarts += 1
            time.sleep(RESTART_S)

    async def _run(self) -> None:
        self._wake, self._stop = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            await self._runner(self)
        finally:
            self._loop = self._wake = self._stop = None
            self._asleep = False
