# SPDX-License-Identifier: Apache-2.0
"""Evict on one rank: takes chunks out of the tiers named, and says of each what became of it.

What is in use stays and is said to be; what another conversation needs is `shared` (unless forced); a chunk whose
write to disk is still on its way is waited for, at most a second for the whole command, so that it cannot come back
afterwards; a missing file is `absent`. Chunks go from the end of the chain to its head, so that a prefix never goes
before what needs it. A remote tier is only touched by name and with `force`, since other instances may use it.

Threads: the rank worker's pool; no I/O but a rename under a lock. Errors: statuses, never exceptions for a bad chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from semkv.bus.status import ChunkStatus, State, Tier
from semkv.consumers.storage import device, disk_entries, files, hot
from semkv.consumers.storage.backends import Backends
from semkv.consumers.storage.ops import Control, OpResult
from semkv.consumers.storage.steps import StepClock
from semkv.consumers.storage.verdict import end_state

_GOOD = (ChunkStatus.REMOVED, ChunkStatus.ABSENT)
_PUT_WAIT_S = 1.0
_POLL_S = 0.002
# Of several tiers' words for one chunk the worst is the chunk's.
_WORST_FIRST = (
    ChunkStatus.FAILED,
    ChunkStatus.IN_USE,
    ChunkStatus.UNSUPPORTED,
    ChunkStatus.REMOVED,
    ChunkStatus.ABSENT,
)


@dataclass(frozen=True)
class EvictRules:
    """What others' interests allow: which chunks this tenant may see, and which of them others need."""

    visible: Callable[[int], bool]
    shared: frozenset[int]


@dataclass(frozen=True)
class RemoteRemover:
    """How chunks are removed from the remote tier.

    exists: whether a chunk is there; remove: bytes removed, None if it was not there; NotImplementedError where the
    connector cannot remove.
    """

    name: str
    exists: Callable[[Any], bool]
    remove: Callable[[Any], int | None]


class Evict:
    """One evict command on one rank."""

    def __init__(
        self,
        backends: Backends,
        rules: EvictRules,
        *,
        hashes: tuple[int, ...],
        tiers: tuple[Tier, ...],
        control: Control,
        remote: RemoteRemover | None,
        stage: device.Stage | None = None,
    ) -> None:
        self._backends = backends
        self._rules = rules
        self._requested = hashes
        self._hashes = tuple(dict.fromkeys(hashes))
        # A device copy goes with its DDR object: if both are named, it is taken before.
        self._tiers = tuple(sorted(tiers, key=lambda tier: tier is not Tier.DEVICE))
        self._control = control
        self._remote = remote
        self._stage = stage
        self._clock = StepClock()
        self._bytes: dict[str, int] = {}
        self._reasons: dict[str, None] = {}
        self._retired: list[str] = []
        self._put_deadline = time.monotonic() + _PUT_WAIT_S

    def run(self, *, dry_run: bool = False) -> OpResult:
        """Go through the chunks from the last to the first."""
        statuses: dict[int, ChunkStatus] = {}
        stop: State | None = None
        keys = self._backends.keys(self._hashes)
        try:
            with self._clock.span("kv.tier.evict"):
                for chunk_hash, key in zip(reversed(self._hashes), reversed(keys), strict=True):
                    stop = self._control.stopped()
                    if stop is not None:
                        self._say(f"{stop} after {len(statuses)} of {len(self._hashes)} chunks")
                        break
                    statuses[chunk_hash] = self._judge(chunk_hash, key, dry_run)
                    self._control.progress(1, 0)
        finally:
            files.unlink_all(self._retired)
        done = tuple(statuses.get(chunk_hash, ChunkStatus.NOT_TRIED) for chunk_hash in self._requested)
        removed = sum(status is ChunkStatus.REMOVED for status in statuses.values())
        self._clock.count("kv.tier.evict", removed, sum(self._bytes.values()))
        return OpResult(
            state=stop or end_state(done, _GOOD),
            reason="; ".join(self._reasons) or None,
            chunk_status=done,
            bytes_by_tier=dict(self._bytes),
            steps=self._clock.steps(),
        )

    def _say(self, reason: str) -> None:
        self._reasons[reason] = None

    def _judge(self, chunk_hash: int, key: Any, dry_run: bool) -> ChunkStatus:
        if not self._rules.visible(chunk_hash):
            return ChunkStatus.ABSENT
        if chunk_hash in self._rules.shared:
            return ChunkStatus.SHARED
        if not dry_run:
            self._wait_for_put(key)
        words = [self._from_tier(tier, key, dry_run) for tier in self._tiers]
        if Tier.DEVICE in self._tiers and Tier.CPU in self._tiers and words[self._tiers.index(Tier.CPU)] in _GOOD:
            words[0] = ChunkStatus.REMOVED if words[0] is ChunkStatus.IN_USE else words[0]  # it went all the same
        words += [self._unknown_backend(name) for name in self._backends.others()]
        return worst(word for word in words if word is not None)

    def _unknown_backend(self, name: str) -> ChunkStatus | None:
        self._say(f"{name} is not operated on")
        return ChunkStatus.UNSUPPORTED

    def _wait_for_put(self, key: Any) -> None:
        disk = self._backends.disk
        while disk is not None and disk.exists_in_put_tasks(key) and time.monotonic() < self._put_deadline:
            if self._control.stopped() is not None:
                return
            time.sleep(_POLL_S)

    def _from_tier(self, tier: Tier, key: Any, dry_run: bool) -> ChunkStatus | None:
        try:
            if tier is Tier.CPU:
                word, size = self._from_cpu(key, dry_run)
            elif tier is Tier.DISK:
                word, size = self._from_disk(key, dry_run)
            elif tier is Tier.REMOTE:
                word, size = self._from_remote(key, dry_run)
            elif self._stage is not None:
                word, size = device.remove(self._backends, self._stage, key, dry_run=dry_run)
            else:
                self._say(f"tier {tier} is not operated on: this rank has no device stage")
                return ChunkStatus.UNSUPPORTED
        except Exception as error:
            self._say(f"{tier}: {type(error).__name__}: {error}")
            return ChunkStatus.FAILED
        if word is ChunkStatus.REMOVED:
            self._bytes[str(tier)] = self._bytes.get(str(tier), 0) + size
        return word

    def _from_cpu(self, key: Any, dry_run: bool) -> tuple[ChunkStatus, int]:
        beside = device.bytes_of(self._backends, self._stage, key)
        word, size = self._look_in_cpu(key) if dry_run else hot.remove(self._backends.cpu, key)
        if beside and word is ChunkStatus.REMOVED:
            self._bytes[str(Tier.DEVICE)] = self._bytes.get(str(Tier.DEVICE), 0) + beside
        return word, size

    def _look_in_cpu(self, key: Any) -> tuple[ChunkStatus, int]:
        cpu = self._backends.cpu
        with cpu.cpu_lock:
            memory_obj = cpu.hot_cache.get(key)
            if memory_obj is None or not memory_obj.is_valid():
                return ChunkStatus.ABSENT, 0
            if not memory_obj.can_evict:
                return ChunkStatus.IN_USE, 0
            return ChunkStatus.REMOVED, int(memory_obj.get_physical_size())

    def _from_disk(self, key: Any, dry_run: bool) -> tuple[ChunkStatus, int]:
        disk = self._backends.disk
        if disk is None:
            return ChunkStatus.ABSENT, 0
        with disk.disk_lock:
            meta = disk.dict.get(key)
            if disk.exists_in_put_tasks(key) or (meta is not None and meta.is_pinned):
                return ChunkStatus.IN_USE, 0
            if dry_run and meta is not None:
                return ChunkStatus.REMOVED, int(meta.size)
            meta, retired = disk_entries.take_locked(disk, key)
        if retired is None:  # neither entry nor file, or an entry whose file had gone
            return ChunkStatus.ABSENT, 0
        self._retired.append(retired)
        return ChunkStatus.REMOVED, int(meta.size)

    def _from_remote(self, key: Any, dry_run: bool) -> tuple[ChunkStatus, int]:
        if self._remote is None:
            return ChunkStatus.ABSENT, 0
        if dry_run:
            return (ChunkStatus.REMOVED if self._remote.exists(key) else ChunkStatus.ABSENT), 0
        try:
            size = self._remote.remove(key)
        except NotImplementedError:
            self._say(f"{self._remote.name} cannot remove chunks")
            return ChunkStatus.UNSUPPORTED, 0
        return (ChunkStatus.ABSENT, 0) if size is None else (ChunkStatus.REMOVED, size)


def worst(words: Iterable[ChunkStatus]) -> ChunkStatus:
    """The word for a chunk from its tiers' words."""
    found = set(words)
    return next((word for word in _WORST_FIRST if word in found), ChunkStatus.ABSENT)
