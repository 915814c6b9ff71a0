# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a rank's storage: chunks in dictionaries, with switches that make it slow, hang or fail.

It keeps what the operations promise and nothing of LMCache; what a real engine does is tested with a real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.bus.steps import Step
from semkv.consumers.storage.ops import Control, OpResult, TierInfo

CHUNK_BYTES = 1024


class StandInStorage:
    """Chunks on 'disk' can be loaded to 'cpu'. `gates` holds back every chunk of a prefetch until opened."""

    def __init__(self, disk: Iterable[int] = (), cpu: Iterable[int] = ()) -> None:
        self.disk = set(disk)
        self.cpu = set(cpu)
        self.lock = threading.Lock()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.loads: list[int] = []
        self.retained: dict[tuple[str, str, str], set[int]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.running = 0
        self.most_running = 0
        self.fail_with: Exception | None = None

    def _enter(self, name: str, hashes: tuple[int, ...]) -> None:
        with self.lock:
            self.calls.append((name, hashes))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.entered.release()
        if self.fail_with is not None:
            with self.lock:
                self.running -= 1
            raise self.fail_with

    def _leave(self) -> None:
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
        self._enter("prefetch", hashes)
        started = time.time_ns()
        status: list[ChunkStatus] = []
        try:
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
            done = len(status)
            status += [ChunkStatus.NOT_TRIED] * (len(hashes) - done)
            good = sum(s in (ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE) for s in status)
            state = stopped or (State.SUCCEEDED if good == len(hashes) else State.PARTIAL)
            loaded = status.count(ChunkStatus.LOADED)
            prefix = next((i for i, s in enumerate(status) if s not in ("loaded", "already_there")), len(status))
            step = Step("kv.tier.load disk→cpu", started, time.time_ns(), {"kv.bytes": loaded * CHUNK_BYTES})
            moved = {"cpu": loaded * CHUNK_BYTES}
            return OpResult(state, None, tuple(status), moved, prefix, (step,) if loaded else ())
        finally:
            self._leave()

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
        self._enter("evict", hashes)
        started = time.time_ns()
        status = []
        try:
            self.gate.wait()
            kept = set().union(*self.retained.values()) if self.retained else set()
            with self.lock:
                for chunk in hashes:
                    if chunk in kept and not force:
                        status.append(ChunkStatus.SHARED)
                        continue
                    found = False
                    for tier, chunks in ((Tier.CPU, self.cpu), (Tier.DISK, self.disk)):
                        if (tiers is None or tier in tiers) and chunk in chunks:
                            found = True
                            if not dry_run:
                                chunks.discard(chunk)
                    status.append(ChunkStatus.REMOVED if found else ChunkStatus.ABSENT)
            state = State.PARTIAL if ChunkStatus.SHARED in status else State.SUCCEEDED
            return OpResult(state, None, tuple(status), steps=(Step("kv.tier.evict", started, time.time_ns()),))
        finally:
            self._leave()

    def locate(self, hashes: tuple[int, ...], *, tenant: str) -> OpResult:
        self._enter("locate", hashes)
        try:
            self.gate.wait()
            with self.lock:
                rows = tuple(
                    tuple(tier for tier, held in ((Tier.CPU, self.cpu), (Tier.DISK, self.disk)) if chunk in held)
                    for chunk in hashes
                )
            return OpResult(State.SUCCEEDED, chunk_tiers=rows)
        finally:
            self._leave()

    def retain(self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str) -> OpResult:
        self._enter("retain", hashes)
        with self.lock:
            self.retained[(tenant, client, session)] = set(hashes)
        self._leave()
        return OpResult(State.SUCCEEDED, chunk_status=(ChunkStatus.ALREADY_THERE,) * len(hashes))

    def release(self, client: str, session: str, tenant: str) -> OpResult:
        self._enter("release", ())
        with self.lock:
            self.retained.pop((tenant, client, session), None)
        self._leave()
        return OpResult(State.SUCCEEDED)

    def tiers(self) -> list[TierInfo]:
        return [TierInfo("cpu", 1 << 20, len(self.cpu) * CHUNK_BYTES, len(self.cpu))]
