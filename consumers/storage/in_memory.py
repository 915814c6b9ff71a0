# SPDX-License-Identifier: Apache-2.0
"""Operations over sets of hashes: what storage that has no engine behind it has in common.

It knows no conversations: nothing is ever `shared` but what is retained, and nothing is in use.
Threads: any; every function takes `lock`. Errors: none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from semkv.bus.status import ChunkStatus, State, Tier
from semkv.bus.steps import Step
from semkv.consumers.storage.ops import OpResult
from semkv.consumers.storage.verdict import end_state, leading, step_name


class InMemoryChunks:
    """Which chunks are in `cpu` and on `disk`, and who retains which."""

    def __init__(self, disk: Iterable[int] = (), cpu: Iterable[int] = ()) -> None:
        self.lock = threading.Lock()
        self.disk = set(disk)
        self.cpu = set(cpu)
        self.retained: dict[tuple[str, str, str], set[int]] = {}

    def left_ddr(self, chunk: int) -> None:
        """A chunk has left DDR by an evict. Called with `lock` held."""

    @staticmethod
    def prefetched(
        found: Sequence[ChunkStatus], wanted: int, stopped: State | None, moved: int, began_ns: int
    ) -> OpResult:
        """What a prefetch of `wanted` chunks says that got so far and moved so many bytes."""
        statuses = (*found, *(ChunkStatus.NOT_TRIED,) * (wanted - len(found)))
        step = Step(step_name(Tier.DISK), began_ns, time.time_ns(), {"kv.bytes": moved})
        steps = (step,) if moved else ()
        return OpResult(
            stopped or end_state(statuses), None, statuses, {str(Tier.CPU): moved}, leading(statuses), steps
        )

    def remove(
        self, hashes: tuple[int, ...], tiers: tuple[Tier, ...] | None, *, force: bool, dry_run: bool
    ) -> OpResult:
        """The evict, for all hashes at one instant."""
        began = time.time_ns()
        named = tiers or (Tier.CPU, Tier.DISK)
        with self.lock:
            kept = set() if force else set().union(*self.retained.values())
            found = tuple(self._remove(chunk, named, kept, dry_run) for chunk in hashes)
        state = State.PARTIAL if ChunkStatus.SHARED in found else State.SUCCEEDED
        return OpResult(state, None, found, steps=(Step("kv.tier.evict", began, time.time_ns()),))

    def _remove(self, chunk: int, named: tuple[Tier, ...], kept: set[int], dry_run: bool) -> ChunkStatus:
        held = [(tier, chunks) for tier, chunks in self._tiers() if tier in named and chunk in chunks]
        if not held:
            return ChunkStatus.ABSENT
        if chunk in kept:
            return ChunkStatus.SHARED
        for tier, chunks in held if not dry_run else ():
            chunks.discard(chunk)
            if tier is Tier.CPU:
                self.left_ddr(chunk)
        return ChunkStatus.REMOVED

    def _tiers(self) -> tuple[tuple[Tier, set[int]], ...]:
        return (Tier.CPU, self.cpu), (Tier.DISK, self.disk)

    def locate(self, hashes: tuple[int, ...], *, tenant: str) -> OpResult:
        """Which tiers hold each chunk."""
        with self.lock:
            rows = tuple(tuple(tier for tier, chunks in self._tiers() if chunk in chunks) for chunk in hashes)
        return OpResult(State.SUCCEEDED, chunk_tiers=rows)

    def retain(self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str) -> OpResult:
        """Keep chunks until released, in place of what was retained before; the time is not kept."""
        with self.lock:
            self.retained[(tenant, client, session)] = set(hashes)
        return OpResult(State.SUCCEEDED, chunk_status=(ChunkStatus.ALREADY_THERE,) * len(hashes))

    def release(self, client: str, session: str, tenant: str) -> OpResult:
        """End what this client retained for this session."""
        with self.lock:
            self.retained.pop((tenant, client, session), None)
        return OpResult(State.SUCCEEDED)
