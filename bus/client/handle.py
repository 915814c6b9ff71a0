# SPDX-License-Identifier: Apache-2.0
"""A command on its way: who is expected to answer, what has been answered, and the outcome of the whole.

A handle belongs to the loop of its client. Nothing here waits longer than it was told: a rank that does not answer is
reported by name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semkv.bus.domain import HashDomain
from semkv.bus.messages import Accepted, Command, Result
from semkv.bus.status import State

if TYPE_CHECKING:
    from semkv.bus.client.kv import KV

UNANSWERED = "unanswered"
"""State of a command that no rank has answered in time; it may still run."""

_LOOK_S = 1.0


@dataclass(frozen=True, order=True)
class RankName:
    """One rank of one instance."""

    instance: str
    rank: int
    epoch: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.instance}.{self.rank}"


@dataclass(frozen=True)
class CommandResult:
    """How a command ended: one result per rank that answered, and the names of those that did not."""

    command_id: str
    op: str
    state: State | str
    """The ranks' common state; `partial` if they differ or some are silent; `unanswered` if all are."""
    results: tuple[Result, ...]
    unanswered: tuple[RankName, ...]
    duplicate: bool
    """The server had this command already: these are the answers given then."""
    differences: dict[RankName, dict[str, tuple[object, object]]]
    """Ranks that rejected the command for their hash domain: field to (the client's, the rank's)."""

    def counts(self) -> Counter[str]:
        """Chunk statuses over all ranks."""
        total: Counter[str] = Counter()
        for result in self.results:
            total.update(result.counts)
        return total

    @property
    def usable_prefix(self) -> int:
        """How many chunks from the start every rank that answered can use."""
        return min((result.usable_prefix for result in self.results), default=0)

    @property
    def ok(self) -> bool:
        """Every expected rank succeeded."""
        return self.state == State.SUCCEEDED

    @property
    def reason(self) -> str | None:
        """Why it did not succeed, in a line."""
        parts = [f"{r.instance}.{r.rank}: {r.reason}" for r in self.results if r.reason]
        for name, fields in sorted(self.differences.items()):
            shown = ", ".join(f"{f}: ours {mine!r}, its {theirs!r}" for f, (mine, theirs) in fields.items())
            parts.append(f"{name} differs in {shown}")
        if self.unanswered:
            parts.append("no answer from " + ", ".join(str(name) for name in self.unanswered))
        return "; ".join(parts) or None


class CommandHandle:
    """What the client's commands return. A command over the size limit has several parts, each with its own id."""

    def __init__(
        self, kv: KV, parts: Sequence[Command], expected: Sequence[RankName], domain: HashDomain | None
    ) -> None:
        self._kv = kv
        self._parts = list(parts)
        self._domain = domain
        self.expected = tuple(sorted(expected))
        self.duplicate = False
        self._accepted: dict[str, dict[RankName, Accepted]] = {part.command_id: {} for part in parts}
        self._results: dict[str, dict[RankName, Result]] = {part.command_id: {} for part in parts}
        names = set(self.expected)
        self._unaccepted: dict[str, set[RankName]] = {part.command_id: set(names) for part in parts}
        self._unanswered: dict[str, set[RankName]] = {part.command_id: set(names) for part in parts}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def command_id(self) -> str:
        """The id of the command, or of its first part."""
        return self._parts[0].command_id

    @property
    def command_ids(self) -> tuple[str, ...]:
        """The ids of all parts."""
        return tuple(part.command_id for part in self._parts)

    @property
    def op(self) -> str:
        return self._parts[0].type

    @property
    def domain(self) -> str:
        return self._parts[0].domain

    @property
    def instance(self) -> str:
        """The instance it addresses, or `all`."""
        return self._parts[0].instance

    def take(self, answer: Accepted | Result) -> None:
        """An answer has arrived; the first result of a rank and epoch counts."""
        name = RankName(answer.instance, answer.rank, answer.epoch)
        if isinstance(answer, Accepted):
            self._accepted[answer.command_id].setdefault(name, answer)
        else:
            self._results[answer.command_id].setdefault(name, answer)
            self._note(self._unanswered, answer.command_id, name)
        self._note(self._unaccepted, answer.command_id, name)

    def _note(self, missing: dict[str, set[RankName]], command_id: str, name: RankName) -> None:
        """Wakes who waits once there is nothing more to wait for; with many ranks most answers are not the last."""
        names = missing.get(command_id)
        if names is None:
            return
        names.discard(name)
        if not names:
            del missing[command_id]
            if not missing:
                for waiter in self._waiters:
                    if not waiter.done():
                        waiter.set_result(None)

    def _silent(self, *, accepted_is_enough: bool = False) -> set[RankName]:
        missing = self._unaccepted if accepted_is_enough else self._unanswered
        return set().union(*missing.values())

    @property
    def done(self) -> bool:
        """Whether every expected rank has given its result."""
        return not any(self._unanswered.values())

    async def accepted(self, timeout: float | None = 5.0) -> tuple[RankName, ...]:
        """Waits until every expected rank has accepted (or answered); returns those that have."""
        await self._until(lambda: not any(self._unaccepted.values()), timeout)
        missing = self._silent(accepted_is_enough=True)
        return tuple(name for name in self.expected if name not in missing)

    async def result(self, timeout: float | None = 30.0) -> CommandResult:
        """Waits for every expected rank's result, at most `timeout` seconds (None: as long as the ranks are alive).

        Returns in any case; ranks that have not answered are named in `unanswered`.
        """
        if not await self._until(lambda: self.done, timeout):
            with contextlib.suppress(Exception):  # it is the last look; what is there already counts
                await self._kv.fetch_answers([self])
        return self._outcome()

    async def cancel(self) -> CommandHandle:
        """Asks the ranks to stop this command between chunks; returns the cancel command's own handle."""
        return await self._kv.cancel(self)

    async def _until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while not done():
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - loop.time())
            if left <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=left)
            finally:
                self._waiters.discard(waiter)
            if not done() and self._kv.all_gone(self._silent()):
                return done()
        return True

    def _outcome(self) -> CommandResult:
        silent = self._silent()
        names = sorted({name for answers in self._results.values() for name in answers})
        results = tuple(self._merged(name) for name in names if name not in silent)
        states = {result.state for result in results}
        state: State | str
        if not results:
            state = UNANSWERED
        elif len(states) == 1 and not silent:
            state = next(iter(states))
        else:
            state = State.PARTIAL
        differences: dict[RankName, dict[str, tuple[object, object]]] = {}
        for result in results:
            if result.hash_domain is not None and self._domain is not None:
                differences[RankName(result.instance, result.rank)] = self._domain.differences(result.hash_domain)
        return CommandResult(
            self.command_id, self.op, state, results, tuple(sorted(silent)), self.duplicate, differences
        )

    def _merged(self, name: RankName) -> Result:
        """One rank's results of all parts as one."""
        parts = [self._results[part.command_id][name] for part in self._parts]
        first = parts[0]
        if len(parts) == 1:
            return first
        states = {part.state for part in parts}
        counts: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        prefix, whole = 0, True
        for command, part in zip(self._parts, parts, strict=True):
            counts.update(part.counts)
            moved.update(part.bytes_by_tier)
            prefix += part.usable_prefix if whole else 0
            whole = whole and part.usable_prefix == len(getattr(command, "chunk_hashes", ()))
        tiers = [part.chunk_tiers for part in parts]
        return first.model_copy(
            update={
                "state": first.state if len(states) == 1 else State.PARTIAL,
                "reason": "; ".join(part.reason for part in parts if part.reason) or None,
                "chunk_status": tuple(status for part in parts for status in part.chunk_status),
                "counts": dict(counts),
                "bytes_by_tier": dict(moved),
                "usable_prefix": prefix,
                "queued_ms": max(part.queued_ms for part in parts),
                "ran_ms": sum(part.ran_ms for part in parts),
                "chunk_tiers": None if None in tiers else tuple(row for part in tiers for row in part or ()),
            }
        )
