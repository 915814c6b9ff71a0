# SPDX-License-Identifier: Apache-2.0
"""A few daemon threads that run blocking calls.

Unlike the standard library's executor, a call that hangs does not keep the process from ending. `submit` may be called
from any thread; the callback runs on the pool's thread. A call that raises is logged and costs no thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class DaemonPool:
    """`threads` threads, made on first use."""

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` on one of the threads."""
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except Exception:
                log.exception("a call of %s failed", self._name)
            self._idle.release()

    def close(self) -> None:
        """Lets the threads end after their present calls; does not wait."""
        for _ in self._threads:
            self._calls.put(None)
