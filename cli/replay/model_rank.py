# SPDX-License-Identifier: Apache-2.0
"""A rank's storage by a model instead of an engine: which chunks are where, and how long moving them takes.

DDR holds `ddr_chunks`, the least recently used leave first; the SSD holds everything stored until it is evicted. A
prefetch takes `fixed_ms` once and `chunk_ms` for each chunk read, really slept, so that queues, deadlines and cancels
behave as they would; an evict takes `fixed_ms`. It knows no conversations: nothing is ever `shared` but what is
retained, and nothing is in use. Good for "would it have been in time?", not for "would it have been spared?".
Thread-safe, as `StorageOps` asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.cli.replay.latency import LatencyModel
from semkv.consumers.storage.in_memory import InMemoryChunks
from semkv.consumers.storage.ops import Control, OpResult, TierInfo

_SLICE_S = 0.005


class ModelStorage(InMemoryChunks):
    """`StorageOps` by a `LatencyModel`."""

    def __init__(self, model: LatencyModel) -> None:
        super().__init__()
        self._model = model
        self._order: OrderedDict[int, None] = OrderedDict()  # of what is in DDR, the oldest first

    def stored(self, hashes: Iterable[int]) -> None:
        """A request has left these chunks: in DDR as the newest, and on the SSD."""
        with self.lock:
            for chunk in hashes:
                self.disk.add(chunk)
                self._admit(chunk)

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
        if tier is not Tier.CPU:
            return OpResult(State.FAILED, f"the model has no tier {tier.value}", (ChunkStatus.NOT_TRIED,) * len(hashes))
        began = time.time_ns()
        found: list[ChunkStatus] = []
        moved, stopped = 0, None
        if not dry_run:
            self._wait(self._model.fixed_ms, control)
        for chunk in hashes:
            stopped = control.stopped()
            if stopped is not None:
                break
            status = self._one(chunk, budget_bytes, moved, dry_run, control)
            if status is ChunkStatus.LOADED and not dry_run:
                moved += self._model.chunk_bytes
                control.progress(1, self._model.chunk_bytes)
            if status in {ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED}:
                found.append(status)
                stopped = control.stopped() if status is ChunkStatus.NOT_TRIED else None
                break
            if order is Order.PREFIX and found and found[-1] in {ChunkStatus.MISSING, ChunkStatus.UNREACHABLE}:
                status = ChunkStatus.UNREACHABLE
            found.append(status)
        return self.prefetched(found, len(hashes), stopped, moved, began)

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
        self._wait(self._model.fixed_ms, control)
        return self.remove(hashes, tiers, force=force, dry_run=dry_run)

    def tiers(self) -> list[TierInfo]:
        size = self._model.chunk_bytes
        with self.lock:
            ddr, disk = len(self.cpu), len(self.disk)
        return [
            TierInfo("cpu", self._model.ddr_chunks * size, ddr * size, ddr),
            TierInfo("disk", max(disk, 1) * size, disk * size, disk),
        ]

    def _one(self, chunk: int, budget: int | None, moved: int, dry_run: bool, control: Control) -> ChunkStatus:
        with self.lock:
            if chunk in self.cpu:
                self._order.move_to_end(chunk)
                return ChunkStatus.ALREADY_THERE
            if chunk not in self.disk:
                return ChunkStatus.MISSING
        if budget is not None and moved + self._model.chunk_bytes > budget:
            return ChunkStatus.NO_MEMORY
        if dry_run:
            return ChunkStatus.LOADED
        self._wait(self._model.chunk_ms, control)
        if control.stopped() is not None:
            return ChunkStatus.NOT_TRIED
        with self.lock:
            self._admit(chunk)
        return ChunkStatus.LOADED

    def _admit(self, chunk: int) -> None:
        self.cpu.add(chunk)
        self._order[chunk] = None
        self._order.move_to_end(chunk)
        while len(self.cpu) > self._model.ddr_chunks:
            self.cpu.discard(self._order.popitem(last=False)[0])

    def left_ddr(self, chunk: int) -> None:
        del self._order[chunk]

    def _wait(self, ms: float, control: Control) -> None:
        deadline = time.monotonic() + ms / 1000
        while (left := deadline - time.monotonic()) > 0 and control.stopped() is None:
            time.sleep(min(left, _SLICE_S))
