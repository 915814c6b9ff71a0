# SPDX-License-Identifier: Apache-2.0
"""`StorageOps` on a real LMCache engine: the front door of this folder.

Each call refuses modes it does not support, asks the forest what others need, runs the operation, and turns any bug
into state `failed` with its reason. It never blocks LMCache's event loop, uses no loading events and no lookup ids,
and needs nothing from the scheduler.

Threads: any number of pool threads at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import device, estimate, sources
from semkv.consumers.storage.backends import LOCAL_TIERS, Backends
from semkv.consumers.storage.evict import Evict, EvictRules, RemoteRemover
from semkv.consumers.storage.inflight import InFlight
from semkv.consumers.storage.ops import Control, OpResult, TierInfo
from semkv.consumers.storage.prefetch import Prefetch, PrefetchRules, Watch
from semkv.consumers.storage.remote import remote_tier
from semkv.consumers.storage.verdict import step_name

logger = logging.getLogger("semkv.consumers.storage")

F = TypeVar("F", bound=Callable[..., OpResult])


class Forest(Protocol):
    """What the operations ask of the prefix forest."""

    def visible(self, tenant: str, chunk_hash: int) -> bool:
        """Whether this tenant may learn anything about the chunk."""

    def idle(self, chunk_hash: int) -> bool:
        """True if no live conversation's chain goes through the chunk."""

    def retained(self, chunk_hash: int) -> bool:
        """True if somebody asked for the chunk to stay."""

    def shared(self, tenant: str, session: str | None, hashes: tuple[int, ...]) -> frozenset[int]:
        """Those of `hashes` that an evict by this tenant and session must leave alone."""

    def retain(self, tenant: str, client: str, session: str, hashes: tuple[int, ...], ttl_s: float) -> tuple[int, ...]:
        """Keep chunks for a while; returns those that are kept."""

    def release(self, tenant: str, client: str, session: str) -> int:
        """End what was retained; returns how many chunks that was."""


def _never_raises(operation: F) -> F:
    @functools.wraps(operation)
    def guarded(*args: Any, **kwargs: Any) -> OpResult:
        try:
            return operation(*args, **kwargs)
        except Exception as error:
            logger.exception("storage operation %s failed", operation.__name__)
            return OpResult(State.FAILED, f"{type(error).__name__}: {error}")

    return cast(F, guarded)


class LMCacheStorage:
    """The storage operations of one rank."""

    def __init__(self, engine: Any, forest: Forest, *, watch: Watch | None = None) -> None:
        self._backends = Backends(engine)
        self._forest = forest
        self._watch = watch
        self._inflight = InFlight()
        self._to_device = InFlight()
        self._rates: dict[str, float] = {}

    @property
    def inflight(self) -> InFlight:
        """The loads under way, for whoever wants to know whether a lookup came too early."""
        return self._inflight

    @_never_raises
    def prefetch(
        self,
        hashes: tuple[int, ...],
        *,
        order: Order = Order.PREFIX,
        tier: Tier = Tier.CPU,
        budget_bytes: int | None = None,
        dry_run: bool = False,
        control: Control | None = None,
        tenant: str = "default",
        session: str | None = None,
    ) -> OpResult:
        """Bring chunks to DDR (see `prefetch.Prefetch`), and from there to the device (see `device.StagePrefetch`)."""
        refusal = self._backends.unsupported_mode()
        if refusal is None and tier is Tier.DEVICE:
            refusal = device.refusal(self._backends.engine)
        elif refusal is None and tier is not Tier.CPU:
            refusal = f"tier {tier} cannot be prefetched to: use {Tier.CPU} or {Tier.DEVICE}"
        if refusal is not None:
            return _refused(refusal, hashes)
        rules = PrefetchRules(
            visible=functools.partial(self._forest.visible, tenant),
            may_evict=lambda chunk_hash: not self._forest.retained(chunk_hash),
            idle=self._forest.idle,
        )
        if dry_run:
            planned = self._dry_run(hashes, rules, order, budget_bytes)
            if tier is Tier.DEVICE and (stage := self._stage) is not None:
                size_of = self._size_of
                planned = device.dry_run(
                    planned, self._backends, stage, hashes=hashes, budget_bytes=budget_bytes, size_of=size_of
                )
            return planned
        result = Prefetch(
            self._backends,
            self._inflight,
            rules,
            hashes=hashes,
            order=order,
            budget_bytes=budget_bytes,
            control=control or Control(),
            find=self._find,
            watch=self._watch,
        ).run()
        if tier is Tier.DEVICE and (stage := self._stage) is not None:
            onwards = device.StagePrefetch(
                self._backends, stage, self._to_device, order=order, budget_bytes=budget_bytes
            )
            result = onwards.run(hashes, result, control or Control())
        self._learn_rates(result)
        return result

    @property
    def _stage(self) -> device.Stage | None:
        return device.stage_of(self._backends.engine)

    def _learn_rates(self, result: OpResult) -> None:
        for step in result.steps:
            moved, busy = int(step.attributes["kv.bytes"]), int(step.attributes["kv.busy_ns"])
            if moved and busy:
                self._rates[step.name] = moved * 1e9 / busy

    def _dry_run(
        self, hashes: tuple[int, ...], rules: PrefetchRules, order: Order, budget_bytes: int | None
    ) -> OpResult:
        return estimate.dry_run(
            self._backends,
            rules.visible,
            hashes=hashes,
            order=order,
            budget_bytes=budget_bytes,
            size_of=self._size_of,
            rate=lambda tier: self._rates.get(step_name(tier)),
        )

    def _find(self, key: Any) -> sources.Found | None:
        found = sources.find_on_disk(self._backends.disk, key)
        if found is not None:
            return found
        remote = remote_tier(self._backends.remote)
        return None if remote is None else remote.find(key)

    def _size_of(self, key: Any) -> tuple[Tier, int] | None:
        size = sources.size_on_disk(self._backends.disk, key)
        if size is not None:
            return Tier.DISK, size
        remote = remote_tier(self._backends.remote)
        size = None if remote is None else remote.size_of(key)
        return None if size is None else (Tier.REMOTE, size)

    @_never_raises
    def evict(
        self,
        hashes: tuple[int, ...],
        *,
        tiers: tuple[Tier, ...] | None = None,
        force: bool = False,
        dry_run: bool = False,
        control: Control | None = None,
        tenant: str = "default",
        session: str | None = None,
    ) -> OpResult:
        """Remove chunks (see `evict.Evict`)."""
        refusal = self._backends.unsupported_mode()
        if refusal is None and tiers is not None and Tier.REMOTE in tiers and not force:
            refusal = "evicting from the remote tier needs force: other instances may use it"
        if refusal is not None:
            return _refused(refusal, hashes)
        shared = frozenset[int]() if force else self._forest.shared(tenant, session, hashes)
        return Evict(
            self._backends,
            EvictRules(functools.partial(self._forest.visible, tenant), shared),
            hashes=hashes,
            tiers=LOCAL_TIERS if tiers is None else tuple(dict.fromkeys(tiers)),
            control=control or Control(),
            remote=self._remote(),
            stage=self._stage,
        ).run(dry_run=dry_run)

    def _remote(self) -> RemoteRemover | None:
        remote = remote_tier(self._backends.remote)
        return None if remote is None else remote.remover()

    @_never_raises
    def locate(self, hashes: tuple[int, ...], *, tenant: str = "default") -> OpResult:
        """Which tiers hold each chunk."""
        refusal = self._backends.unsupported_mode()
        if refusal is not None:
            return _refused(refusal, hashes)
        found = tuple(
            self._tiers_of(key) if self._forest.visible(tenant, chunk_hash) else ()
            for chunk_hash, key in zip(hashes, self._backends.keys(hashes), strict=True)
        )
        statuses = tuple(ChunkStatus.ALREADY_THERE if tiers else ChunkStatus.ABSENT for tiers in found)
        usable = next((index for index, tiers in enumerate(found) if not tiers), len(found))
        return OpResult(State.SUCCEEDED, chunk_status=statuses, usable_prefix=usable, chunk_tiers=found)

    def _tiers_of(self, key: Any) -> tuple[Tier, ...]:
        cpu = self._backends.cpu
        with cpu.cpu_lock:
            memory_obj = cpu.hot_cache.get(key)
            held = [Tier.CPU] if memory_obj is not None and memory_obj.is_valid() else []
        if device.bytes_of(self._backends, self._stage, key) is not None:
            held.insert(0, Tier.DEVICE)
        if sources.size_on_disk(self._backends.disk, key) is not None:
            held.append(Tier.DISK)
        remote = remote_tier(self._backends.remote)
        if remote is not None and remote.exists(key):
            held.append(Tier.REMOTE)
        return tuple(held)

    @_never_raises
    def retain(
        self, client: str, session: str, hashes: tuple[int, ...], ttl_s: float, tenant: str = "default"
    ) -> OpResult:
        """Keep chunks from being evicted by others until released or `ttl_s` is over."""
        kept = frozenset(self._forest.retain(tenant, client, session, hashes, ttl_s))
        statuses = tuple(ChunkStatus.ALREADY_THERE if h in kept else ChunkStatus.ABSENT for h in hashes)
        state = State.SUCCEEDED if len(kept) == len(set(hashes)) else State.PARTIAL
        return OpResult(state, chunk_status=statuses)

    @_never_raises
    def release(self, client: str, session: str, tenant: str = "default") -> OpResult:
        """End what this client retained for this session."""
        count = self._forest.release(tenant, client, session)
        return OpResult(State.SUCCEEDED, None if count else "nothing was retained")

    def tiers(self) -> list[TierInfo]:
        """Capacity and use of each tier; empty before the engine is ready."""
        if self._backends.unsupported_mode() is not None:
            return []
        cpu, disk = self._backends.cpu, self._backends.disk
        found = [
            TierInfo(str(Tier.CPU), self._backends.pool_bytes(), self._backends.pool_used_bytes(), len(cpu.hot_cache))
        ]
        if disk is not None:
            found.append(
                TierInfo(str(Tier.DISK), int(disk.max_cache_size), int(disk.current_cache_size), len(disk.dict))
            )
        if (stage := self._stage) is not None:
            used, copies = stage.usage()
            found.append(TierInfo(str(Tier.DEVICE), stage.capacity, used, copies))
        return found


def _refused(reason: str, hashes: tuple[int, ...]) -> OpResult:
    return OpResult(State.REJECTED, reason, (ChunkStatus.UNSUPPORTED,) * len(hashes))
