# SPDX-License-Identifier: Apache-2.0
"""Prefetch on one rank: chunks from disk or a remote store into DDR, with the truth about each.

Every chunk that counts as loaded or already there is held by one reference until the end, so that a prefetch can never
report what it evicted itself; at the end all are looked at once more in one critical section, which is the instant the
result speaks of. Nothing is pinned in DDR, no read happens under a lock, and a buffer that was not read whole is never
registered. What is held stays under half the pool; memory comes from victims that nobody uses, retains or talks about.

A few chunks are on their way at once: this thread finds, allocates and registers while another reads, and reads when it
would have to wait. Outcomes count in the order of the hashes, so that the answer is that of reading one after another.
It waits for other operations' loads only while none of its own is on its way, so that no two wait for each other.

Threads: one call per pool thread, `readers` for its reads; overlapping calls share loads.
Errors: statuses, never exceptions for a bad chunk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import hot, sources
from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.inflight import InFlight
from semkv.consumers.storage.ops import Control, OpResult
from semkv.consumers.storage.readers import READERS, Readers, Reading
from semkv.consumers.storage.steps import StepClock
from semkv.consumers.storage.verdict import GOOD, end_state, leading, step_name

_YIELD_S = 0.05
_POLL_S = 0.001
_AHEAD = 4 * READERS  # chunks on their way at once, so that the readers never wait for this thread


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


class _OnItsWay:
    """One chunk between being found and being counted. `size` is what it holds of the pool."""

    __slots__ = ("index", "memory_obj", "reading", "size", "status")

    def __init__(self, index: int, status: ChunkStatus | None = None) -> None:
        self.index = index
        self.status = status
        self.memory_obj: Any = None
        self.size = 0
        self.reading: Reading | None = None


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
        self._readers = Readers(len(self._hashes), self._before_a_read)
        self._window: deque[_OnItsWay] = deque()
        self._held: dict[int, Any] = {}
        self._held_bytes = 0  # of chunks held and of those on their way
        self._loaded_bytes = 0  # likewise
        self._clock = StepClock()
        self._bytes: dict[Tier, int] = {}
        self._status: list[ChunkStatus] = []
        self._reason: str | None = None
        self._stop: State | None = None
        self._rest: ChunkStatus | None = None  # set once nothing more is to be begun

    def _may_go(self, key: Any) -> bool:
        return key.chunk_hash not in self._own and self._rules.may_evict(key.chunk_hash)

    def run(self) -> OpResult:
        """Load the chunks, then settle."""
        self._inflight.plan(self._hashes)
        if self._watch is not None:
            self._watch.begins(self._control.command_id, self._hashes)
        try:
            self._load_all()
            if self._stop is not None:
                self._reason = f"{self._stop} after {len(self._status)} of {len(self._hashes)} chunks"
            rest = self._rest or ChunkStatus.NOT_TRIED
            self._status += [rest] * (len(self._hashes) - len(self._status))
            self._settle()
        finally:
            self._let_go_of_window()
            self._readers.close()
            self._inflight.settle(self._hashes)
            if self._watch is not None:
                self._watch.ends(self._control.command_id)
            for memory_obj in self._held.values():
                memory_obj.ref_count_down()
            self._held.clear()
        return self._result()

    def _load_all(self) -> None:
        index = 0
        while True:
            while index < len(self._hashes) and len(self._window) < _AHEAD and self._may_begin():
                taken = self._take(index)
                if taken is None:
                    break
                self._window.append(taken)
                index += 1
            if not self._window:
                return
            self._count(self._window[0])

    def _may_begin(self) -> bool:
        if self._window and self._window[-1].status is not None and self._after(self._window[-1].status) is not None:
            return False  # it will end the command as soon as it is counted
        if self._rest is None and self._stopped():
            self._rest = ChunkStatus.NOT_TRIED
        return self._rest is None

    def _stopped(self) -> bool:
        self._stop = self._stop or self._control.stopped()
        return self._stop is not None

    def _before_a_read(self) -> bool:
        """Let live requests load first, for a while; whether the read is still wanted. In a reading thread."""
        until = time.monotonic() + _YIELD_S
        while self._backends.live_loading() and time.monotonic() < until:
            if self._control.stopped() is not None:
                return False
            time.sleep(_POLL_S)
        return self._control.stopped() is None

    def _after(self, status: ChunkStatus) -> ChunkStatus | None:
        """What the rest of the chunks are if this one ends the command."""
        if status is ChunkStatus.NO_MEMORY:
            return ChunkStatus.NOT_TRIED
        if self._order is not Order.PREFIX:
            return None
        return {ChunkStatus.MISSING: ChunkStatus.UNREACHABLE, ChunkStatus.FAILED: ChunkStatus.NOT_TRIED}.get(status)

    # -- towards the window

    def _take(self, index: int) -> _OnItsWay | None:
        """Begin with one chunk; None if it must not begin yet, or not at all (then `_rest` is set)."""
        chunk_hash, key = self._hashes[index], self._keys[index]
        if not self._rules.visible(chunk_hash):
            return _OnItsWay(index, ChunkStatus.MISSING)
        while True:
            taken = self._hold(index, key)
            if taken is not None:
                return taken
            running = self._inflight.begin(chunk_hash)
            if running is None:
                break
            if self._window:
                return None
            if not self._inflight.wait(running, self._control):
                self._stopped()
                self._rest = ChunkStatus.NOT_TRIED
                return None
        try:
            taken = self._hold(index, key) or self._begin(index, key)  # it may have come in during the claim
        except BaseException:
            self._inflight.end(chunk_hash)
            raise
        if taken is None or taken.reading is None:
            self._inflight.end(chunk_hash)
        return taken

    def _hold(self, index: int, key: Any) -> _OnItsWay | None:
        memory_obj = hot.hold(self._cpu, key)
        if memory_obj is None:
            return None
        taken = _OnItsWay(index, ChunkStatus.ALREADY_THERE)
        size = int(memory_obj.get_physical_size())
        if self._held_bytes + size > self._cap:
            memory_obj.ref_count_down()  # looked at once more at the end, without being held until then
        else:
            taken.memory_obj, taken.size = memory_obj, size
            self._held_bytes += size
        return taken

    def _begin(self, index: int, key: Any) -> _OnItsWay | None:
        try:
            found = self._find(key)
        except OSError as error:
            self._reason = str(error)
            return _OnItsWay(index, ChunkStatus.FAILED)
        if found is None:
            return _OnItsWay(index, ChunkStatus.MISSING)
        try:
            taken = self._begin_found(index, found)
        except BaseException:
            found.close()
            raise
        if taken is None or taken.reading is None:
            found.close()
        return taken

    def _begin_found(self, index: int, found: sources.Found) -> _OnItsWay | None:
        over_budget = self._budget is not None and self._loaded_bytes + found.size > self._budget
        over_cap = self._held_bytes + found.size > self._cap
        if (over_budget or over_cap) and self._window:
            return None  # a load that fails may leave room for this one
        if over_budget:
            self._reason = f"the budget of {self._budget} bytes is used up"
            self._rest = ChunkStatus.NOT_TRIED
            return None
        if over_cap:
            self._reason = f"no memory: a prefetch holds at most half the pool, {self._cap} bytes"
            return _OnItsWay(index, ChunkStatus.NO_MEMORY)
        memory_obj = self._room.allocate(found.shape, found.dtype, found.fmt)
        if memory_obj is None:
            return _OnItsWay(index, ChunkStatus.NO_MEMORY)
        taken = _OnItsWay(index)
        taken.memory_obj, taken.size = memory_obj, int(memory_obj.get_physical_size())
        taken.reading = Reading(found, memory_obj)
        self._held_bytes += taken.size
        self._loaded_bytes += taken.size
        self._readers.submit(taken.reading)
        return taken

    # -- out of the window

    def _count(self, first: _OnItsWay) -> None:
        """Count the oldest chunk on its way; whatever it ends, the rest of the window goes unregistered."""
        status = first.status if first.reading is None else self._read_out(first, first.reading)
        if status is None:
            self._stopped()
            self._rest = ChunkStatus.NOT_TRIED
            self._let_go_of_window()
            return
        if first.memory_obj is not None and status in GOOD:
            self._held[first.index], first.memory_obj = first.memory_obj, None
            self._held_bytes += first.size
            self._loaded_bytes += first.size if status is ChunkStatus.LOADED else 0
        self._let_go(self._window.popleft())
        self._status.append(status)
        self._control.progress(1, 0)
        if status is ChunkStatus.NO_MEMORY:
            self._reason = self._reason or "no memory: nothing evictable is left in the pool"
        rest = self._after(status)
        if rest is not None:
            self._rest = rest
            self._let_go_of_window()

    def _read_out(self, first: _OnItsWay, reading: Reading) -> ChunkStatus | None:
        """Wait for a read and register what it brought; None if it was not tried."""
        self._readers.finish(reading)
        if reading.tried:
            self._clock.add(step_name(reading.found.tier), reading.began_ns, reading.ended_ns)
        if isinstance(reading.error, sources.ChunkGoneError):
            self._reason = str(reading.error)
            return ChunkStatus.MISSING
        if reading.error is not None:
            self._reason = f"{type(reading.error).__name__}: {reading.error}"
            return ChunkStatus.FAILED
        return self._register(first, reading.found) if reading.tried else None

    def _register(self, first: _OnItsWay, found: sources.Found) -> ChunkStatus:
        memory_obj = first.memory_obj
        first.memory_obj = present = hot.register(self._cpu, self._keys[first.index], memory_obj)
        if present is None:
            return ChunkStatus.NO_MEMORY
        if present is not memory_obj:
            return ChunkStatus.ALREADY_THERE
        size = first.size
        self._bytes[found.tier] = self._bytes.get(found.tier, 0) + size
        self._clock.count(step_name(found.tier), 1, size)
        self._control.progress(0, size)
        if self._watch is not None:
            self._watch.loaded(Loaded(self._control.command_id, self._hashes[first.index], memory_obj, size))
        return ChunkStatus.LOADED

    def _let_go(self, taken: _OnItsWay) -> None:
        """Give back what a chunk on its way holds, once nobody writes into it any more."""
        self._held_bytes -= taken.size
        if taken.reading is not None:
            self._readers.finish(taken.reading)
            taken.reading.found.close()
            self._inflight.end(self._hashes[taken.index])
            self._loaded_bytes -= taken.size
        if taken.memory_obj is not None:
            taken.memory_obj.ref_count_down()

    def _let_go_of_window(self) -> None:
        if self._window:
            self._readers.skip_rest()
        while self._window:
            self._let_go(self._window.popleft())

    def _settle(self) -> None:
        chain = [(index, self._keys[index]) for index, status in enumerate(self._status) if status in GOOD]
        held = frozenset(self._held)
        present = hot.settle(self._cpu, chain, self._held)
        for index, there in present.items():
            if not there:
                self._status[index] = ChunkStatus.MISSING if index in held else ChunkStatus.NO_MEMORY

    def _result(self) -> OpResult:
        by_hash = dict(zip(self._hashes, self._status, strict=True))
        statuses = tuple(by_hash[chunk_hash] for chunk_hash in self._requested)
        return OpResult(
            state=self._stop or end_state(statuses),
            reason=self._reason,
            chunk_status=statuses,
            bytes_by_tier={str(tier): size for tier, size in self._bytes.items()},
            usable_prefix=leading(statuses),
            steps=self._clock.steps(),
        )
