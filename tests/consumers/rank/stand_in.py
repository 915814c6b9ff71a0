# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a rank's storage: chunks in dictionaries, with switches that make it slow, hang or fail.

It keeps what the operations promise and nothing of LMCache; what a real engine does is tested with a real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from semkv.bus.status import ChunkStatus, Order, Tier
from semkv.consumers.storage.in_memory import InMemoryChunks
from semkv.consumers.storage.ops import Control, OpResult, TierInfo

CHUNK_BYTES = 1024


class StandInStorage(InMemoryChunks):
    """Chunks on 'disk' can be loaded to 'cpu'. `gates` holds back every chunk of a prefetch until opened."""

    def __init__(self, disk: Iterable[int] = (), cpu: Iterable[int] = ()) -> None:
        super().__init__(disk, cpu)
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.loads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.running = 0
        self.most_running = 0
        self.fail_with: Exception | None = None

    @contextmanager
    def _entered(self, name: str, hashes: tuple[int, ...]) -> Iterator[None]:
        with self.lock:
            self.calls.append((name, hashes))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.entered.release()
        try:
            if self.fail_with is not None:
                raise self.fail_with
            yield
        finally:
            with self.lock:
                self.running -= 1

    def prefetch(
        self,
        hashes: tuple[int, ...],
        *,
        order: Order,
        tier: Tier,
        budget_bytes: int | None,
        dry_run: bool,
        control: Control,
        tenant: str,
        session: str | None,
    ) -> OpResult:
        started = time.time_ns()
        status: list[ChunkStatus] = []
        with self._entered("prefetch", hashes):
            for chunk in hashes:
                while not self.gate.wait(0.005):
                    if control.cancelled or control.expired():
                        break
                if control.cancelled or control.expired():
                    break
                with self.lock:
                    if chunk in self.cpu:
                        status.append(ChunkStatus.ALREADY_THERE)
                    elif chunk in self.disk:
                        if not dry_run:
                            self.cpu.add(chunk)
                            self.loads.append(chunk)
                        status.append(ChunkStatus.LOADED)
                    else:
                        status.append(ChunkStatus.MISSING)
            stopped = control.stopped() if len(status) < len(hashes) else None
            moved = status.count(ChunkStatus.LOADED) * CHUNK_BYTES
            return self.prefetched(status, len(hashes), stopped, moved, started)

    def evict(
        self,
        hashes: tuple[int, ...],
        *,
        tiers: tuple[Tier, ...] | None,
        force: bool,
        dry_run: bool,
        control: Control,
        tenant: str,
        session: str | None,
    ) -> OpResult:
        with self._entered("evict", hashes):
            self.gate.wait()
            return self.remove(hashes, tiers, force=force, dry_run=dry_run)

    def locate(self, hashes: tuple[int, ...], *, tenant: str) -> OpResult:
        with self._entered("locate", hashes):
            self.gate.wait()
            return super().locate(hashes, tenant=tenant)

    def retain(self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str) -> OpResult:
        with self._entered("retain", hashes):
            return super().retain(client, session, hashes, ttl_s, tenant)

    def release(self, client: str, session: str, tenant: str) -> OpResult:
        with self._entered("release", ()):
            return super().release(client, session, tenant)

    def tiers(self) -> list[TierInfo]:
        return [TierInfo("cpu", 1 << 20, len(self.cpu) * CHUNK_BYTES, len(self.cpu))]
