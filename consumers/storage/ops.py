# SPDX-License-Identifier: Apache-2.0
"""What a rank worker asks of its storage, and the truth it gets back.

Every operation is a blocking call made from the rank worker's own thread pool, ends in bounded time, and never
raises: a bug becomes state `failed` with its reason. `Control` is how the caller stops one that runs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.bus.steps import Step


class Control:
    """Stops a running operation, and shows how far it is. Any thread."""

    def __init__(self, deadline_ns: int | None = None, command_id: str = "") -> None:
        """`deadline_ns` is on the clock of `time.monotonic_ns`; None means no deadline."""
        self.deadline_ns = deadline_ns
        self.command_id = command_id
        self.chunks_done = 0
        self.bytes_done = 0
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ask the operation to stop before its next chunk."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled.is_set()

    def expired(self) -> bool:
        """True once the deadline has passed."""
        return self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns

    def stopped(self) -> State | None:
        """The state to end with if the operation has to stop now."""
        if self.cancelled:
            return State.CANCELLED
        return State.EXPIRED if self.expired() else None

    def progress(self, chunks: int, size: int) -> None:
        """Count finished chunks and their bytes."""
        self.chunks_done += chunks
        self.bytes_done += size


@dataclass(frozen=True)
class OpResult:
    """How one operation ended on this rank."""

    state: State
    reason: str | None = None
    chunk_status: tuple[ChunkStatus, ...] = ()
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    usable_prefix: int = 0
    steps: tuple[Step, ...] = ()
    chunk_tiers: tuple[tuple[Tier, ...], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many chunks have each status."""
        return {str(status): count for status, count in Counter(self.chunk_status).items()}


@dataclass(frozen=True)
class TierInfo:
    """One tier of this rank, as the registry shows it."""

    name: str
    capacity_bytes: int
    used_bytes: int
    chunks: int


class StorageOps(Protocol):
    """The operations of one storage rank."""

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
        """Bring chunks to `tier`; each chunk's status is what is true at the instant the result is made."""

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
        """Remove chunks that nobody else's conversation needs from `tiers` (default: the local ones)."""

    def locate(self, hashes: tuple[int, ...], *, tenant: str) -> OpResult:
        """Which tiers hold each chunk."""

    def retain(self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str) -> OpResult:
        """Keep chunks from being evicted by others until released or `ttl_s` is over."""

    def release(self, client: str, session: str, tenant: str) -> OpResult:
        """End what this client retained for this session."""

    def tiers(self) -> list[TierInfo]:
        """Capacity and use of each tier."""
