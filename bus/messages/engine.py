# SPDX-License-Identifier: Apache-2.0
"""engine.v1: one rank is alive; what it is and what it holds. Free of tenants: every tenant may read it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from semkv.bus.domain import HashDomain
from semkv.bus.fields import Count, Name, Positive, RoleField, Text
from semkv.bus.messages.base import Message


class TierUsage(BaseModel):
    """How full one tier is."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Name
    capacity_bytes: Count
    used_bytes: Count
    chunks: Count


class EngineInfo(Message):
    """The registry's entry of one rank, put every 2 seconds under `<instance>.<rank>`."""

    type: ClassVar[str] = "engine"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "registry"

    epoch: Count
    rank: Count
    world_size: Positive
    role: RoleField
    hash_domain: HashDomain
    capabilities: tuple[Name, ...] = ()
    tiers: tuple[TierUsage, ...] = ()
    versions: dict[str, Text] = Field(default_factory=dict)
    inflight: Count = 0
