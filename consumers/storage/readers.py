# SPDX-License-Identifier: Apache-2.0
"""Reads several chunks side by side, while the thread that asked for them prepares and registers others.

A read spends its time in the kernel without Python's lock; the bookkeeping of a chunk takes about a fifth of the time
its 2 MiB take to read. Done in turns, the one waits for the other; here they overlap, and a disk gets more than one
request at a time. Whoever waits for a read does what has not begun meanwhile, so that on a busy machine nothing hangs
on another thread's being given a core. The threads live as long as the operation that started them; one chunk starts
none.

Threads: all but `before` from the operation's thread; `before` in whichever thread reads, before each chunk.
Errors: none are raised; a read keeps what went wrong.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from semkv.consumers.storage.latch import Latch
from semkv.consumers.storage.sources import Found

READERS = 2


class Reading:
    """One chunk's read into its memory object. `tried` is false where the operation ended before it began."""

    __slots__ = ("_done", "began_ns", "ended_ns", "error", "found", "memory_obj", "tried")

    def __init__(self, found: Found, memory_obj: Any) -> None:
        self.found = found
        self.memory_obj = memory_obj
        self.error: Exception | None = None
        self.tried = False
        self.began_ns = self.ended_ns = 0
        self._done = Latch()

    @property
    def done(self) -> bool:
        """Whether nobody writes into the object any more."""
        return self._done.opened

    def wait(self) -> None:
        """Return once it is done."""
        self._done.wait()

    def run(self, before: Callable[[], bool]) -> None:
        """Read, unless `before` says not to."""
        try:
            if before():
                self.tried = True
                self.began_ns = time.time_ns()
                self.found.read_into(self.memory_obj)
        except Exception as error:
            self.error = error
        finally:
            self.ended_ns = time.time_ns()
            self._done.open()


class Readers:
    """The reading threads of one operation; `before` is asked before each chunk and may wait."""

    def __init__(self, chunks: int, before: Callable[[], bool]) -> None:
        self._helpers = min(READERS, chunks) - 1
        self._before = before
        self._over = False
        self._queue: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, reading: Reading) -> None:
        """Have a chunk read, by another thread or in `finish`."""
        self._queue.put(reading)
        if len(self._threads) < self._helpers:
            thread = threading.Thread(target=self._work, name="semkv-read", daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self, reading: Reading) -> None:
        """Return once this read is done; until then, do those that have not begun."""
        while not reading.done:
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                reading.wait()
                return
            if waiting is not None:
                waiting.run(self._go_on)

    def skip_rest(self) -> None:
        """Begin no more reads."""
        self._over = True

    def close(self) -> None:
        """End the threads; reads that have not begun are not tried."""
        self.skip_rest()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _go_on(self) -> bool:
        return not self._over and self._before()

    def _work(self) -> None:
        while (reading := self._queue.get()) is not None:
            reading.run(self._go_on)
