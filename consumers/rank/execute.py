# SPDX-License-Identifier: Apache-2.0
"""A command as a call on the storage: what it touches, whether it can be run, and running it.

`run` blocks and belongs to the worker's pool; the rest is pure. Nothing here raises: what goes wrong is the result.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace

from semkv.bus.messages import Command, Evict, Locate, Prefetch, Release, Retain
from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage.ops import Control, OpResult, StorageOps

log = logging.getLogger(__name__)

_REASON_LIMIT = 2000


def requested(command: Command) -> tuple[int, ...]:
    """The chunks a command names."""
    return getattr(command, "chunk_hashes", ())


def keys(command: Command, retained: tuple[int, ...]) -> tuple[Hashable, ...]:
    """What a command touches. A retain and a release also touch what their session retained."""
    if isinstance(command, (Retain, Release)):
        return (("session", command.client, command.session), *requested(command), *retained)
    return requested(command)


def reads_only(command: Command) -> bool:
    """Whether the command only looks."""
    return isinstance(command, Locate) or bool(getattr(command, "dry_run", False))


def not_run(command: Command, state: State, reason: str | None) -> OpResult:
    """The result of a command that was stopped before it began."""
    return OpResult(state=state, reason=reason, chunk_status=(ChunkStatus.NOT_TRIED,) * len(requested(command)))


def objection(command: Command) -> str | None:
    """Why a command cannot be run at all: words this rank does not know, or nothing to do."""
    if isinstance(command, Prefetch):
        if not isinstance(command.order, Order):
            return f"order {command.order!r} is not known here; use {', '.join(Order)}"
        if not isinstance(command.tier, Tier):
            return f"tier {command.tier!r} is not known here; use {Tier.CPU} or {Tier.DEVICE}"
    if isinstance(command, Evict):
        unknown = [tier for tier in command.tiers or () if not isinstance(tier, Tier)]
        if unknown:
            return f"tiers {unknown} are not known here; use {', '.join(Tier)}"
        if command.tiers is not None and not command.tiers:
            return "tiers is empty; name at least one tier, or leave it out for the local ones"
    return None


def run(ops: StorageOps, command: Command, control: Control, retains: tuple[int, ...] = ()) -> OpResult:
    """Runs a command to its end. A bug in the storage is a failed result with its reason.

    `retains` is what a retain keeps, its earlier parts included.
    """
    try:
        return _call(ops, command, control, retains)
    except Exception as error:
        log.exception("%s failed", command.type)
        reason = f"{type(error).__name__}: {error}"[:_REASON_LIMIT]
        status = (ChunkStatus.FAILED,) * len(requested(command))
        return OpResult(state=State.FAILED, reason=reason, chunk_status=status)


def _call(ops: StorageOps, command: Command, control: Control, retains: tuple[int, ...]) -> OpResult:
    if isinstance(command, Prefetch):
        assert isinstance(command.order, Order)
        assert isinstance(command.tier, Tier)
        return ops.prefetch(
            command.chunk_hashes,
            order=command.order,
            tier=command.tier,
            budget_bytes=command.budget_bytes,
            dry_run=command.dry_run,
            control=control,
            tenant=command.tenant,
            session=command.session,
        )
    if isinstance(command, Evict):
        tiers = None if command.tiers is None else tuple(Tier(tier) for tier in command.tiers)
        return ops.evict(
            command.chunk_hashes,
            tiers=tiers,
            force=command.force,
            dry_run=command.dry_run,
            control=control,
            tenant=command.tenant,
            session=command.session,
        )
    if isinstance(command, Locate):
        return ops.locate(command.chunk_hashes, tenant=command.tenant)
    if isinstance(command, Retain):
        kept = retains or command.chunk_hashes
        result = ops.retain(command.client, command.session, kept, float(command.ttl_s), command.tenant)
        asked = len(command.chunk_hashes)  # statuses are of this part's chunks
        return replace(result, chunk_status=result.chunk_status[len(kept) - asked :]) if len(kept) > asked else result
    if isinstance(command, Release):
        return ops.release(command.client, command.session, command.tenant)
    return OpResult(state=State.REJECTED, reason=f"{command.type} is not an operation of this rank")
