# SPDX-License-Identifier: Apache-2.0
"""Which chunks are being loaded right now, so that operations that overlap load each chunk once.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from semkv.consumers.storage.latch import Latch
from semkv.consumers.storage.ops import Control

_POLL_S = 0.05


class InFlight:
    """The chunks whose load has begun but not ended, and those that a running operation has yet to load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[int, Latch] = {}
        self._planned: dict[int, int] = {}

    def begin(self, chunk_hash: int) -> Latch | None:
        """Claim a load: None if it is the caller's now, else what opens when the other's load ends."""
        with self._lock:
            running = self._loading.get(chunk_hash)
            if running is None:
                self._loading[chunk_hash] = Latch()
            return running

    def end(self, chunk_hash: int) -> None:
        """The caller's load has ended, well or not."""
        with self._lock:
            running = self._loading.pop(chunk_hash)
        running.open()

    def wait(self, running: Latch, control: Control) -> bool:
        """Wait for another's load; False if the waiting operation has to stop first."""
        while not running.wait(_POLL_S):
            if control.stopped() is not None:
                return False
        return True

    def plan(self, hashes: Iterable[int]) -> None:
        """An operation means to load these."""
        with self._lock:
            for chunk_hash in hashes:
                self._planned[chunk_hash] = self._planned.get(chunk_hash, 0) + 1

    def settle(self, hashes: Iterable[int]) -> None:
        """An operation is done with these."""
        with self._lock:
            for chunk_hash in hashes:
                left = self._planned.get(chunk_hash, 0) - 1
                if left > 0:
                    self._planned[chunk_hash] = left
                else:
                    self._planned.pop(chunk_hash, None)

    def pending(self, hashes: Iterable[int]) -> list[int]:
        """Those of `hashes` that are being loaded or are about to be."""
        with self._lock:
            return [h for h in hashes if h in self._planned or h in self._loading]
