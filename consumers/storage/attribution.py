# SPDX-License-Identifier: Apache-2.0
"""What became of the chunks that prefetches brought in: useful, redundant, late or wasted.

Told by object identity: of each object a command loaded a weak reference is kept. *Useful*: the device connector
receives that very object for tokens that the engine did not hold. *Redundant*: a request named the chunk, and the
engine held its tokens already. *Late*: a request named a chunk that a prefetch had yet to load; it is counted beside
what becomes of the chunk once it is there. *Wasted*: it went, or nobody came for it in time. A command's outcome is
told once, when nothing of it is open any more. A request that is aborted before it loads looks like one whose tokens
the engine held.

Threads: any; one lock, held for one request's or one slice of chunks at a time, never while callbacks run. What the
engine's own threads call (`looked_up`, `received`, `finished`) only counts; outcomes are told by `ends` and `sweep`,
which belong to other threads. Errors: none reach the engine. Memory: one entry a chunk in DDR, `REQUESTS` requests.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.prefetch import Loaded

logger = logging.getLogger("semkv.consumers.storage")

OPEN_S = 600.0
REQUESTS = 4096
_SLICE = 256
_MARK = "__semkv_attribution__"


@dataclass
class Outcome:
    """What became of one command's chunks. `lead_ms` is the shortest time from load to use, 0 if none was useful."""

    command_id: str
    useful: int = 0
    redundant: int = 0
    late: int = 0
    wasted: int = 0
    bytes: int = 0
    lead_ms: float = 0.0


@dataclass
class _Chunk:
    command_id: str
    chunk_hash: int
    reference: weakref.ref[Any]
    size: int
    loaded_at: float


@dataclass
class _Command:
    outcome: Outcome
    planned: frozenset[int]
    open: int = 0
    late: set[int] = field(default_factory=set)


class Attribution:
    """Follows the chunks of one engine's prefetches."""

    def __init__(
        self,
        on_outcome: Callable[[Outcome], None],
        *,
        on_useful: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_s: float = OPEN_S,
    ) -> None:
        """`on_useful` gets the command and the request that it served, so that their spans can be linked."""
        self._on_outcome = on_outcome
        self._on_useful = on_useful
        self._clock = clock
        self._open_s = open_s
        self._lock = threading.Lock()
        self._backends: Backends | None = None
        self._commands: dict[str, _Command] = {}
        self._running: dict[str, _Command] = {}
        self._over: list[Outcome] = []
        self._by_identity: dict[int, _Chunk] = {}
        self._by_hash: dict[int, int] = {}
        self._requests: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def watch_device(self, engine: Any) -> None:
        """Listen to what the engine's device connector receives, on this engine's connector only."""
        self._backends = Backends(engine)
        load = engine.gpu_connector.batched_to_gpu
        if hasattr(load, _MARK):
            return

        @functools.wraps(load)
        def batched_to_gpu(memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> Any:
            self._guard(self.received, memory_objs, ends, kwargs)
            return load(memory_objs, starts, ends, **kwargs)

        setattr(batched_to_gpu, _MARK, True)
        engine.gpu_connector.batched_to_gpu = batched_to_gpu

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception:
            logger.exception("what a prefetch was worth could not be told")

    def begins(self, command_id: str, hashes: tuple[int, ...]) -> None:
        """A prefetch means to bring these in."""
        with self._lock:
            self._commands[command_id] = self._running[command_id] = _Command(Outcome(command_id), frozenset(hashes))

    def loaded(self, chunk: Loaded) -> None:
        """A prefetch brought a chunk in."""
        with self._lock:
            self._forget(self._by_hash.get(chunk.chunk_hash), "wasted")
            self._forget(id(chunk.memory_obj), "wasted")  # of an object that is gone, and whose address is used again
            command = self._commands.get(chunk.command_id)
            if command is None:
                return
            command.open += 1
            command.outcome.bytes += chunk.size
            self._by_identity[id(chunk.memory_obj)] = _Chunk(
                chunk.command_id, chunk.chunk_hash, weakref.ref(chunk.memory_obj), chunk.size, self._clock()
            )
            self._by_hash[chunk.chunk_hash] = id(chunk.memory_obj)

    def ends(self, command_id: str) -> None:
        """The prefetch is over."""
        with self._lock:
            self._running.pop(command_id, None)
            self._settle(command_id)
        self._tell()

    def looked_up(self, request_id: str, hashes: Sequence[int]) -> None:
        """A request named these chunks."""
        if not self._commands:
            return
        with self._lock:
            named = tuple(h for h in hashes if h in self._by_hash)
            if named:
                self._requests[request_id] = named
                if len(self._requests) > REQUESTS:
                    self._requests.popitem(last=False)
            pending = {
                command.outcome.command_id: late
                for command in self._running.values()
                if (late := {h for h in hashes if h in command.planned and h not in self._by_hash} - command.late)
            }
        if pending:
            self._count_late(pending)

    def _count_late(self, pending: dict[str, set[int]]) -> None:
        """Count what is not in DDR so far: a prefetch names chunks that are there already, too."""
        hot = self._hot(set().union(*pending.values()))
        with self._lock:
            for command_id, late in pending.items():
                command = self._running.get(command_id)
                if command is not None:
                    new = late - command.late - hot
                    command.outcome.late += len(new)
                    command.late |= new

    def _hot(self, hashes: set[int]) -> set[int]:
        if self._backends is None:
            return set()
        # Membership only, without the lock: the thread that answers lookups must not wait for anybody.
        hot_cache = self._backends.cpu.hot_cache
        return {h for h, key in zip(hashes, self._backends.keys(hashes), strict=True) if key in hot_cache}

    def received(self, memory_objs: Sequence[Any], ends: Sequence[int], call: dict[str, Any]) -> None:
        """The device connector is about to load these objects."""
        if not self._by_identity:
            return
        held = int(call.get("vllm_cached_tokens") or 0)
        request_id = str(call.get("req_id") or "")
        served: set[str] = set()
        with self._lock:
            for memory_obj, end in zip(memory_objs, ends, strict=False):
                chunk = self._by_identity.get(id(memory_obj))
                if chunk is None or chunk.reference() is not memory_obj or end <= held:
                    continue
                outcome = self._commands[chunk.command_id].outcome
                lead = (self._clock() - chunk.loaded_at) * 1000
                outcome.lead_ms = min(outcome.lead_ms, lead) if outcome.useful else lead
                self._forget(id(memory_obj), "useful")
                served.add(chunk.command_id)
        for command_id in served if self._on_useful is not None else ():
            self._on_useful(command_id, request_id)  # type: ignore[misc]  # checked above

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended: what they named and did not load, the engine held already."""
        if not self._requests:
            return
        with self._lock:
            for request_id in request_ids:
                for chunk_hash in self._requests.pop(request_id, ()):
                    self._forget(self._by_hash.get(chunk_hash), "redundant")

    def sweep(self) -> None:
        """Settle what has gone or waited too long, and tell the outcomes that are due; call it now and then."""
        now = self._clock()
        with self._lock:
            chunks = list(self._by_identity.items())
        for start in range(0, len(chunks), _SLICE):
            with self._lock:
                for identity, chunk in chunks[start : start + _SLICE]:
                    if self._by_identity.get(identity) is chunk and self._is_wasted(chunk, now):
                        self._forget(identity, "wasted")
        self._tell()

    def _is_wasted(self, chunk: _Chunk, now: float) -> bool:
        memory_obj = chunk.reference()
        return memory_obj is None or not memory_obj.is_valid() or now - chunk.loaded_at >= self._open_s

    def _forget(self, identity: int | None, how: str) -> None:
        chunk = self._by_identity.pop(identity, None) if identity is not None else None
        if chunk is None:
            return
        if self._by_hash.get(chunk.chunk_hash) == identity:
            del self._by_hash[chunk.chunk_hash]
        command = self._commands.get(chunk.command_id)
        if command is None:
            return
        command.open -= 1
        setattr(command.outcome, how, getattr(command.outcome, how) + 1)
        self._settle(chunk.command_id)

    def _settle(self, command_id: str) -> None:
        command = self._commands.get(command_id)
        if command is not None and command.open == 0 and command_id not in self._running:
            del self._commands[command_id]
            self._over.append(command.outcome)

    def _tell(self) -> None:
        with self._lock:
            over, self._over = self._over, []
        for outcome in over:
            self._guard(self._on_outcome, outcome)
