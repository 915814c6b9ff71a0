# SPDX-License-Identifier: Apache-2.0
"""Something that happens once and can be waited for.

One lock instead of a `threading.Event`, which takes several microseconds to make and to set: a prefetch needs two of
them for each chunk. Threads: any number wait, one opens. Errors: none.
"""

from __future__ import annotations

import threading


class Latch:
    """Closed until it is opened, once."""

    __slots__ = ("_lock", "opened")

    def __init__(self) -> None:
        self.opened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everybody through, now and later."""
        self.opened = True
        self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Return once it is open, or after so many seconds (-1: never); whether it is open."""
        if not self.opened and self._lock.acquire(timeout=seconds):
            self._lock.release()  # for the next who waits
        return self.opened
