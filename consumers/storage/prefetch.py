# SPDX-License-Identifier: Apache-2.0
"""Prefetch on one rank: chunks from disk or a remote store into DDR, with the truth about each.

Every chunk that counts as loaded or already there is held by one reference until the end, so that a prefetch can never
report what it evicted itself; at the end all are looked at once more in one critical section, which is the instant the
result speaks of. Nothing is pinned in DDR, no read happens under a lock, and a buffer that was not read whole is never
registered. What is held stays under half the pool; memory comes from victims that nobody uses, retains or talks about.

Threads: one call per pool thread; overlapping calls share loads. Errors: statuses, never exceptions for a bad chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import hot, sources
from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.inflight import InFlight
from semkv.consumers.storage.ops import Control, OpResult
from semkv.consumers.storage.steps import StepClock

_YIELD_S = 0.05
_POLL_S = 0.001
_GOOD = (ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE)


@dataclass(frozen=True)
class PrefetchRules:
    """What others' interests allow: which chunks this tenant may see, which may be evicted, which had better stay."""

    visible: Callable[[int], bool]
    may_evict: Callable[[int], bool]
    idle: Callable[[int], bool]


@dataclass(frozen=True)
class Loaded:
    """One chunk that a prefetch brought in: told to whoever attributes later hits to it."""

    command_id: str
    chunk_hash: int
    memory_obj: Any
    size: int


class Watch(Protocol):
    """Who is told about a prefetch, to attribute later hits to it."""

    def begins(self, command_id: str, hashes: tuple[int, ...]) -> None:
        """A prefetch means to bring these in."""

    def loaded(self, chunk: Loaded) -> None:
        """A prefetch brought a chunk in."""

    def ends(self, command_id: str) -> None:
        """The prefetch is over."""


class Prefetch:
    """One prefetch command on one rank."""

    def __init__(
        self,
        backends: Backends,
        inflight: InFlight,
        rules: PrefetchRules,
        *,
        hashes: tuple[int, ...],
        order: Order,
        budget_bytes: int | None,
        control: Control,
        find: Callable[[Any], sources.Found | None],
        watch: Watch | None = None,
    ) -> None:
        self._backends = backends
        self._cpu = backends.cpu
        self._inflight = inflight
        self._rules = rules
        self._requested = hashes
        self._hashes = tuple(dict.fromkeys(hashes))
        self._keys = backends.keys(self._hashes)
        self._order = order
        self._budget = budget_bytes
        self._control = control
        self._find = find
        self._watch = watch if control.command_id else None  # without a name nothing can be attributed to it
        self._own = frozenset(self._hashes)
        self._room = hot.Room(self._cpu, allowed=self._may_go, better=lambda key: rules.idle(key.chunk_hash))
        self._cap = backends.pool_bytes() // 2
        self._held: dict[int, Any] = {}
        self._held_bytes = 0
        self._loaded_bytes = 0
        self._clock = StepClock()
        self._bytes: dict[str, int] = {}
        self._status: list[ChunkStatus] = []
        self._reason: str | None = None
        self._stop: State | None = None

    def _may_go(self, key: Any) -> bool:
        return key.chunk_hash not in self._own and self._rules.may_evict(key.chunk_hash)

    def run(self) -> OpResult:
        """Load chunk after chunk, then settle."""
        self._inflight.plan(self._hashes)
        if self._watch is not None:
            self._watch.begins(self._control.command_id, self._hashes)
        try:
            rest = self._load_all()
            self._status += [rest] * (len(self._hashes) - len(self._status))
            self._settle()
        finally:
            self._inflight.settle(self._hashes)
            if self._watch is not None:
                self._watch.ends(self._control.command_id)
            for memory_obj in self._held.values():
                memory_obj.ref_count_down()
            self._held.clear()
        return self._result()

    def _load_all(self) -> ChunkStatus:
        for index in range(len(self._hashes)):
            self._stop = self._control.stopped()
            if self._stop is not None:
                self._reason = f"{self._stop} after {index} of {len(self._hashes)} chunks"
                return ChunkStatus.NOT_TRIED
            self._give_way()
            status = self._one(index)
            if status is None:
                return ChunkStatus.NOT_TRIED
            self._status.append(status)
            self._control.progress(1, 0)
            if status is ChunkStatus.NO_MEMORY:
                self._reason = self._reason or "no memory: nothing evictable is left in the pool"
                return ChunkStatus.NOT_TRIED
            if self._order is Order.PREFIX and status is ChunkStatus.MISSING:
                return ChunkStatus.UNREACHABLE
            if self._order is Order.PREFIX and status is ChunkStatus.FAILED:
                return ChunkStatus.NOT_TRIED
        return ChunkStatus.NOT_TRIED

    def _give_way(self) -> None:
        until = time.monotonic() + _YIELD_S
        while self._backends.live_loading() and time.monotonic() < until:
            if self._control.stopped() is not None:
                return
            time.sleep(_POLL_S)

    def _one(self, index: int) -> ChunkStatus | None:
        """One chunk's status so far; None if the operation has to stop before it."""
        chunk_hash, key = self._hashes[index], self._keys[index]
        if not self._rules.visible(chunk_hash):
            return ChunkStatus.MISSING
        while True:
            if self._hold(index, key):
                return ChunkStatus.ALREADY_THERE
            running = self._inflight.begin(chunk_hash)
            if running is None:
                try:
                    return self._load(index, key)
                finally:
                    self._inflight.end(chunk_hash)
            if not self._inflight.wait(running, self._control):
                self._stop = self._control.stopped()
                self._reason = f"{self._stop} after {index} of {len(self._hashes)} chunks"
                return None

    def _hold(self, index: int, key: Any) -> bool:
        memory_obj = hot.hold(self._cpu, key)
        if memory_obj is None:
            return False
        size = int(memory_obj.get_physical_size())
        if self._held_bytes + size > self._cap:
            memory_obj.ref_count_down()  # looked at once more at the end, without being held until then
        else:
            self._held[index] = memory_obj
            self._held_bytes += size
        return True

    def _load(self, index: int, key: Any) -> ChunkStatus | None:
        if self._hold(index, key):  # it may have come in while the claim was made
            return ChunkStatus.ALREADY_THERE
        try:
            found = self._find(key)
        except OSError as error:
            self._reason = str(error)
            return ChunkStatus.FAILED
        if found is None:
            return ChunkStatus.MISSING
        try:
            return self._load_found(index, key, found)
        finally:
            found.close()

    def _load_found(self, index: int, key: Any, found: sources.Found) -> ChunkStatus | None:
        if self._budget is not None and self._loaded_bytes + found.size > self._budget:
            self._reason = f"the budget of {self._budget} bytes is used up"
            return None
        if self._held_bytes + found.size > self._cap:
            self._reason = f"no memory: a prefetch holds at most half the pool, {self._cap} bytes"
            return ChunkStatus.NO_MEMORY
        memory_obj = self._room.allocate(found.shape, found.dtype, found.fmt)
        if memory_obj is None:
            return ChunkStatus.NO_MEMORY
        failure = self._read(found, memory_obj)
        if failure is not None:
            memory_obj.ref_count_down()
            return failure
        return self._register(index, key, found, memory_obj)

    def _read(self, found: sources.Found, memory_obj: Any) -> ChunkStatus | None:
        """Fill the object; what went wrong, or None."""
        try:
            with self._clock.span(step_name(found.tier)):
                found.read_into(memory_obj)
        except sources.ChunkGoneError as error:
            self._reason = str(error)
            return ChunkStatus.MISSING
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"
            return ChunkStatus.FAILED
        return None

    def _register(self, index: int, key: Any, found: sources.Found, memory_obj: Any) -> ChunkStatus:
        present = hot.register(self._cpu, key, memory_obj)
        if present is None:
            return ChunkStatus.NO_MEMORY
        size = int(present.get_physical_size())
        self._held[index] = present
        self._held_bytes += size
        if present is not memory_obj:
            return ChunkStatus.ALREADY_THERE
        self._loaded_bytes += size
        self._bytes[str(found.tier)] = self._bytes.get(str(found.tier), 0) + size
        self._clock.count(step_name(found.tier), 1, size)
        self._control.progress(0, size)
        if self._watch is not None:
            self._watch.loaded(Loaded(self._control.command_id, key.chunk_hash, memory_obj, size))
        return ChunkStatus.LOADED

    def _settle(self) -> None:
        chain = [(index, self._keys[index]) for index, status in enumerate(self._status) if status in _GOOD]
        held = frozenset(self._held)
        present = hot.settle(self._cpu, chain, self._held)
        for index, there in present.items():
            if not there:
                self._status[index] = ChunkStatus.MISSING if index in held else ChunkStatus.NO_MEMORY

    def _result(self) -> OpResult:
        by_hash = dict(zip(self._hashes, self._status, strict=True))
        statuses = tuple(by_hash[chunk_hash] for chunk_hash in self._requested)
        return OpResult(
            state=self._stop or end_state(statuses, _GOOD),
            reason=self._reason,
            chunk_status=statuses,
            bytes_by_tier=dict(self._bytes),
            usable_prefix=leading(statuses),
            steps=self._clock.steps(),
        )


def step_name(tier: Tier) -> str:
    """The step of loads from a tier."""
    return f"kv.tier.load {tier}→cpu"


def leading(statuses: tuple[ChunkStatus, ...]) -> int:
    """How many chunks from the first on are usable."""
    for index, status in enumerate(statuses):
        if status not in _GOOD:
            return index
    return len(statuses)


def end_state(statuses: tuple[ChunkStatus, ...], good: tuple[ChunkStatus, ...]) -> State:
    """`succeeded` if every chunk ended well, `failed` if none did and something broke, else `partial`."""
    fine = sum(status in good for status in statuses)
    if fine == len(statuses):
        return State.SUCCEEDED
    broken = any(status is ChunkStatus.FAILED for status in statuses)
    return State.FAILED if broken and not fine else State.PARTIAL


def dry_run(
    backends: Backends,
    rules: PrefetchRules,
    *,
    hashes: tuple[int, ...],
    order: Order,
    budget_bytes: int | None,
    size_of: Callable[[Any], tuple[Tier, int] | None],
    rate: Callable[[Tier], float | None],
) -> OpResult:
    """What a prefetch would do now, without touching, pinning or loading anything.

    `rate` gives bytes per second seen on a tier so far, for the estimate of the time; None where nothing was loaded
    yet.
    """
    cpu, cap = backends.cpu, backends.pool_bytes() // 2
    statuses: dict[int, ChunkStatus] = {}
    sizes: dict[Tier, int] = {}
    rest: ChunkStatus | None = None
    for chunk_hash, key in zip(hashes, backends.keys(hashes), strict=True):
        if chunk_hash in statuses:
            continue
        if rest is not None:
            statuses[chunk_hash] = rest
            continue
        with cpu.cpu_lock:
            memory_obj = cpu.hot_cache.get(key)
            hot_there = memory_obj is not None and memory_obj.is_valid()
        found = size_of(key) if rules.visible(chunk_hash) and not hot_there else None
        if hot_there and rules.visible(chunk_hash):
            statuses[chunk_hash] = ChunkStatus.ALREADY_THERE
        elif found is None:
            statuses[chunk_hash] = ChunkStatus.MISSING
            rest = ChunkStatus.UNREACHABLE if order is Order.PREFIX else None
        elif budget_bytes is not None and sum(sizes.values()) + found[1] > budget_bytes:
            statuses[chunk_hash] = rest = ChunkStatus.NOT_TRIED
        elif sum(sizes.values()) + found[1] > cap:
            statuses[chunk_hash], rest = ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED
        else:
            statuses[chunk_hash] = ChunkStatus.LOADED
            sizes[found[0]] = sizes.get(found[0], 0) + found[1]
    requested = tuple(statuses[chunk_hash] for chunk_hash in hashes)
    loads = sum(status is ChunkStatus.LOADED for status in statuses.values())
    parts = [f"dry run: {loads} chunks of {sum(sizes.values())} bytes would be loaded"]
    rates = {tier: rate(tier) for tier in sizes}
    if sizes and all(rates.values()):
        seconds = sum(size / (rates[tier] or 1.0) for tier, size in sizes.items())
        parts.append(f"in about {seconds * 1000:.1f} ms")
    elif sizes:
        parts.append("in a time not known yet: nothing was loaded so far")
    return OpResult(
        state=end_state(requested, _GOOD),
        reason=" ".join(parts),
        chunk_status=requested,
        bytes_by_tier={str(tier): size for tier, size in sizes.items()},
        usable_prefix=leading(requested),
    )
