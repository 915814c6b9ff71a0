# SPDX-License-Identifier: Apache-2.0
"""The device tier: copies of DDR chunks on the accelerator, in a stage that belongs to the engine's device connector.

A copy exists only beside a valid object of the hot cache and goes with it, so a prefetch to the device is a prefetch to
DDR first, and then this. A chunk counts as loaded if at the end its object is still the hot cache's, and valid, and the
stage still has the copy. Copies are in use until then, so that a prefetch larger than the stage never takes its own.

Threads: the rank worker's pool. `cpu_lock` is never held while bytes move. Errors: statuses, never exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import hot
from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.inflight import InFlight
from semkv.consumers.storage.ops import Control, OpResult
from semkv.consumers.storage.steps import StepClock
from semkv.consumers.storage.verdict import GOOD, end_state, leading

STEP = "kv.tier.load cpu→device"
SWITCH = "SEMKV_DEVICE_STAGE_MIB"
_YIELD_S = 0.05
_POLL_S = 0.001


class Stage(Protocol):
    """What the device connector's stage can do (see `semkv.native.connector.stage`)."""

    capacity: int

    @property
    def bound(self) -> bool:
        """Whether the engine has registered its pages."""

    def place(self, memory_obj: Any) -> tuple[Any, bool]:
        """The object's copy, in use from now on, and whether it was made; MemoryError if there is no room."""

    def release(self, copies: Iterable[Any]) -> None:
        """These copies are not in use any more."""

    def size_of(self, memory_obj: Any) -> int | None:
        """Bytes of the object's copy, None if there is none."""

    def drop(self, memory_obj: Any) -> bool:
        """Forget the object's copy; False if it is in use."""

    def usage(self) -> tuple[int, int]:
        """Bytes used, copies there."""


def stage_of(engine: Any) -> Stage | None:
    """The stage of this engine's device connector, None if it has none."""
    stage: Stage | None = getattr(engine.gpu_connector, "device_stage", None)
    return stage if stage is not None and stage.bound else None


def refusal(engine: Any) -> str | None:
    """Why nothing can be prefetched to this engine's device, or None."""
    connector = engine.gpu_connector
    if getattr(connector, "device_stage", None) is None:
        return (
            f"tier {Tier.DEVICE} cannot be prefetched to: the device stage is off or unknown to this rank's device "
            f"connector ({type(connector).__name__}); semkv's own connectors have one where {SWITCH} is set"
        )
    if stage_of(engine) is None:
        return f"tier {Tier.DEVICE} cannot be prefetched to: the engine has not registered its KV tensors yet"
    return None


def object_of(backends: Backends, key: Any) -> Any:
    """The valid hot-cache object of `key`, without a reference of LMCache's; None if there is none."""
    with backends.cpu.cpu_lock:
        memory_obj = backends.cpu.hot_cache.get(key)
        return memory_obj if memory_obj is not None and memory_obj.is_valid() else None


def bytes_of(backends: Backends, stage: Stage | None, key: Any) -> int | None:
    """Bytes of the chunk's copy on the device, None if there is none."""
    memory_obj = None if stage is None else object_of(backends, key)
    return None if stage is None or memory_obj is None else stage.size_of(memory_obj)


def remove(backends: Backends, stage: Stage, key: Any, *, dry_run: bool) -> tuple[ChunkStatus, int]:
    """Take the chunk's copy off the device; its DDR object stays."""
    memory_obj = object_of(backends, key)
    size = None if memory_obj is None else stage.size_of(memory_obj)
    if size is None:
        return ChunkStatus.ABSENT, 0
    if not dry_run and not stage.drop(memory_obj):
        return ChunkStatus.IN_USE, 0
    return ChunkStatus.REMOVED, size


class StagePrefetch:
    """The second half of one prefetch to the device: from DDR to the stage."""

    def __init__(
        self,
        backends: Backends,
        stage: Stage,
        inflight: InFlight,
        order: Order,
        budget_bytes: int | None,
    ) -> None:
        self._backends = backends
        self._stage = stage
        self._inflight = inflight
        self._hashes: tuple[int, ...] = ()
        self._keys: list[Any] = []
        self._order = order
        self._budget = budget_bytes
        self._control = Control()
        self._clock = StepClock()
        self._placed: dict[int, tuple[Any, Any]] = {}
        self._moved = 0
        self._reason: str | None = None
        self._stop: State | None = None

    def run(self, requested: tuple[int, ...], loaded: OpResult, control: Control) -> OpResult:
        """Go on from what the prefetch of `requested` to DDR reached."""
        self._hashes = tuple(dict.fromkeys(requested))
        self._keys = self._backends.keys(self._hashes)
        self._control = control
        reached = dict(zip(requested, loaded.chunk_status, strict=True))
        if loaded.state in (State.CANCELLED, State.EXPIRED):
            self._stop, self._reason = loaded.state, loaded.reason
        try:
            found = self._place_all([reached[chunk_hash] for chunk_hash in self._hashes])
            self._settle(found)
        finally:
            self._stage.release(copy for copy, _ in self._placed.values())
        by_hash = dict(zip(self._hashes, found, strict=True))
        statuses = tuple(by_hash[chunk_hash] for chunk_hash in requested)
        reasons = [reason for reason in (loaded.reason, self._reason) if reason]
        moved = {str(Tier.DEVICE): self._moved} if self._moved else {}
        return OpResult(
            state=self._stop or end_state(statuses),
            reason="; ".join(dict.fromkeys(reasons)) or None,
            chunk_status=statuses,
            bytes_by_tier={**loaded.bytes_by_tier, **moved},
            usable_prefix=leading(statuses),
            steps=(*loaded.steps, *self._clock.steps()),
        )

    def _place_all(self, reached: Sequence[ChunkStatus]) -> list[ChunkStatus]:
        found: list[ChunkStatus] = []
        stopped = self._stop is not None
        for index, status in enumerate(reached):
            if status not in GOOD:
                found.append(status)
                continue
            if not stopped:
                self._stop = self._control.stopped()
                if self._stop is not None:
                    self._reason = f"{self._stop} after {index} of {len(self._hashes)} chunks"
                    stopped = True
            if stopped:
                found.append(ChunkStatus.NOT_TRIED)
                continue
            found.append(self._one(index))
            stopped = found[-1] in (ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED) or (
                self._order is Order.PREFIX and found[-1] not in GOOD
            )
        return found

    def _one(self, index: int) -> ChunkStatus:
        chunk_hash = self._hashes[index]
        self._give_way()
        while True:
            running = self._inflight.begin(chunk_hash)
            if running is None:
                try:
                    return self._place(index)
                finally:
                    self._inflight.end(chunk_hash)
            if not self._inflight.wait(running, self._control):
                self._stop = self._control.stopped()
                self._reason = f"{self._stop} after {index} of {len(self._hashes)} chunks"
                return ChunkStatus.NOT_TRIED

    def _give_way(self) -> None:
        until = time.monotonic() + _YIELD_S
        while self._backends.live_loading() and time.monotonic() < until and self._control.stopped() is None:
            time.sleep(_POLL_S)

    def _place(self, index: int) -> ChunkStatus:
        memory_obj = hot.hold(self._backends.cpu, self._keys[index])
        if memory_obj is None:
            self._reason = "chunks left DDR again before they were copied"
            return ChunkStatus.MISSING
        try:
            size = int(memory_obj.get_size())
            over = self._budget is not None and self._moved + size > self._budget
            if over and self._stage.size_of(memory_obj) is None:
                self._reason = f"the budget of {self._budget} bytes is used up"
                return ChunkStatus.NOT_TRIED
            start = time.time_ns()
            copy, made = self._stage.place(memory_obj)
            self._placed[index] = copy, memory_obj
            if not made:
                return ChunkStatus.ALREADY_THERE
            self._clock.add(STEP, start, time.time_ns())
            self._clock.count(STEP, 1, size)
            self._moved += size
            self._control.progress(0, size)
            return ChunkStatus.LOADED
        except MemoryError as error:
            self._reason = f"no memory: {error}"
            return ChunkStatus.NO_MEMORY
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"
            return ChunkStatus.FAILED
        finally:
            memory_obj.ref_count_down()

    def _settle(self, found: list[ChunkStatus]) -> None:
        """Look once more at every copy that counts, in one critical section of the hot cache."""
        cpu = self._backends.cpu
        with cpu.cpu_lock:
            for index, (_, memory_obj) in self._placed.items():
                there = cpu.hot_cache.get(self._keys[index]) is memory_obj and self._stage.size_of(memory_obj)
                if not there:
                    found[index] = ChunkStatus.MISSING
                    self._reason = "chunks left DDR again before the end, and the device with it"


def dry_run(
    loaded: OpResult,
    backends: Backends,
    stage: Stage,
    *,
    hashes: tuple[int, ...],
    budget_bytes: int | None,
    size_of: Callable[[Any], tuple[Tier, int] | None],
) -> OpResult:
    """What a prefetch to the device would do now, after what the prefetch to DDR would do. Touches nothing.

    Every other copy may have to make room.
    """
    keys = dict(zip(hashes, backends.keys(hashes), strict=True))
    reached = dict(zip(hashes, loaded.chunk_status, strict=True))
    found: dict[int, ChunkStatus] = {}
    moved = kept = 0
    rest: ChunkStatus | None = None
    for chunk_hash, status in reached.items():
        if status not in GOOD or rest is not None:
            found[chunk_hash] = status if status not in GOOD else ChunkStatus.NOT_TRIED
            continue
        memory_obj = object_of(backends, keys[chunk_hash])
        size = None if memory_obj is None else stage.size_of(memory_obj)
        if size is not None:
            kept += size
            found[chunk_hash] = ChunkStatus.ALREADY_THERE
            continue
        on_disk = size_of(keys[chunk_hash]) if memory_obj is None else None
        size = int(memory_obj.get_size()) if memory_obj is not None else on_disk[1] if on_disk is not None else 0
        if budget_bytes is not None and moved + size > budget_bytes:
            found[chunk_hash] = rest = ChunkStatus.NOT_TRIED
        elif kept + moved + size > stage.capacity:
            found[chunk_hash] = rest = ChunkStatus.NO_MEMORY
        else:
            found[chunk_hash] = ChunkStatus.LOADED
            moved += size
    statuses = tuple(found[chunk_hash] for chunk_hash in hashes)
    copies = sum(status is ChunkStatus.LOADED for status in found.values())
    return replace(
        loaded,
        state=end_state(statuses),
        reason=f"{loaded.reason}; {copies} chunks of {moved} bytes would be copied to the device",
        chunk_status=statuses,
        bytes_by_tier={**loaded.bytes_by_tier, **({str(Tier.DEVICE): moved} if moved else {})},
        usable_prefix=leading(statuses),
    )
