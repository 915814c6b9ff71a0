# SPDX-License-Identifier: Apache-2.0
"""result.v1: how one rank ended a command. Exactly one per command, rank and epoch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from semkv.bus.domain import HashDomain
from semkv.bus.fields import (
    ChunkStatuses,
    ChunkTiers,
    Count,
    Millis,
    Name,
    OpField,
    Positive,
    Reason,
    StateField,
    Token,
)
from semkv.bus.messages.base import TenantMessage


class Result(TenantMessage):
    """Terminal answer of a rank.

    `chunk_status` has one word per requested chunk, in the command's order (empty where nothing was tried), `counts`
    sums it up. `chunk_tiers` answers a locate: the tiers that hold each chunk. `hash_domain` is the rank's own full
    domain, sent with a rejection for another domain.
    """

    type: ClassVar[str] = "result"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "res"

    command_id: Token
    client: Name
    op: OpField
    rank: Count
    world_size: Positive
    epoch: Count
    state: StateField
    reason: Reason | None = None
    chunk_status: ChunkStatuses = ()
    counts: dict[str, Count] = Field(default_factory=dict)
    bytes_by_tier: dict[str, Count] = Field(default_factory=dict)
    usable_prefix: Count = 0
    queued_ms: Millis = 0.0
    ran_ms: Millis = 0.0
    trace_id: Token | None = None
    chunk_tiers: ChunkTiers | None = None
    hash_domain: HashDomain | None = None
