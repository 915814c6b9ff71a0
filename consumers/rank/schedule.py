# SPDX-License-Identifier: Apache-2.0
"""Which command may run when: in stream order where it matters, side by side where it does not.

Commands of one tenant that touch a common chunk run in the order they were added; commands that only look (locate, dry
runs) do not hold each other up. At most `slots` run at a time. A job whose answer was given while it waited (expired,
cancelled) keeps its place, so that those behind it still wait for those before it, but is never run. A job that nothing
holds up is started before it is entered for others to see. One event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Job(Generic[T]):
    """One command in the schedule. `keys` is what it touches within its tenant."""

    work: T
    tenant: str
    keys: tuple[Hashable, ...]
    reads_only: bool = False
    waits_for: int = 0
    before: list[Job[T]] = field(default_factory=list)
    running: bool = False
    settled: bool = False
    """Its answer has been given without running it."""


class _Key(Generic[T]):
    """Who touches one key: the newest writer, and those who look since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer: Job[T] | None = None
        self.readers: list[Job[T]] | None = None


class ConflictSchedule(Generic[T]):
    """Calls `run(job)` when a job's turn has come; the owner calls `done(job)`, later, when it has ended."""

    def __init__(self, run: Callable[[Job[T]], None], slots: int) -> None:
        self._run = run
        self._free = slots
        self._ready: deque[Job[T]] = deque()
        self._tenants: dict[str, dict[Hashable, _Key[T]]] = {}
        self.jobs: set[Job[T]] = set()
        """All that have not left the schedule."""

    def add(self, job: Job[T]) -> None:
        """Puts a job behind all earlier ones it conflicts with."""
        self.jobs.add(job)
        earlier = self._conflicting(job)
        job.waits_for = len(earlier)
        for other in earlier:
            other.before.append(job)
        if not earlier:
            self._ready.append(job)
            self._start()
        self._enter(job)

    def _conflicting(self, job: Job[T]) -> set[Job[T]]:
        earlier: set[Job[T]] = set()
        table = self._tenants.get(job.tenant)
        if not table:
            return earlier
        for key in job.keys:
            state = table.get(key)
            if state is None:
                continue
            if state.readers and not job.reads_only:
                earlier.update(state.readers)
            elif state.writer is not None:
                earlier.add(state.writer)
        return earlier

    def _enter(self, job: Job[T]) -> None:
        table = self._tenants.setdefault(job.tenant, {})
        for key in set(job.keys):
            state = table.get(key)
            if state is None:
                state = table[key] = _Key()
            if not job.reads_only:
                state.writer, state.readers = job, None
            elif state.readers is None:
                state.readers = [job]
            else:
                state.readers.append(job)

    def settle(self, job: Job[T]) -> None:
        """The job needs no run any more."""
        job.settled = True
        self._start()

    def done(self, job: Job[T]) -> None:
        """A job that ran has ended."""
        self._free += 1
        job.running = False
        self._leave([job])
        self._start()

    def _start(self) -> None:
        while self._ready:
            if self._ready[0].settled:
                self._leave([self._ready.popleft()])
            elif self._free > 0:
                job = self._ready.popleft()
                job.running = True
                self._free -= 1
                self._run(job)
            else:
                # settled ones further back need no slot
                settled = [job for job in self._ready if job.settled]
                if not settled:
                    return
                self._ready = deque(job for job in self._ready if not job.settled)
                self._leave(settled)

    def _leave(self, jobs: Iterable[Job[T]]) -> None:
        for job in jobs:
            self.jobs.discard(job)
            table = self._tenants.get(job.tenant, {})
            for key in set(job.keys):
                state = table.get(key)
                if state is None:
                    continue
                if state.writer is job:
                    state.writer = None
                if state.readers and job.reads_only and job in state.readers:
                    state.readers.remove(job)
                if state.writer is None and not state.readers:
                    del table[key]
            if not table:
                self._tenants.pop(job.tenant, None)
            for other in job.before:
                other.waits_for -= 1
                if other.waits_for == 0:
                    self._ready.append(other)
            job.before = []
