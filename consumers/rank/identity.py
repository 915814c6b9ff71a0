# SPDX-License-Identifier: Apache-2.0
"""Who a rank is: what it announces, and what it compares commands with. Immutable; any thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from semkv.bus import subjects
from semkv.bus.domain import HashDomain
from semkv.bus.status import Role


@dataclass(frozen=True)
class RankIdentity:
    """One worker process of one engine instance."""

    instance: str
    rank: int
    world_size: int
    role: Role
    domain: HashDomain
    epoch: int = field(default_factory=time.time_ns)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.instance or self.instance == subjects.ALL:
            raise ValueError(f"instance {self.instance!r}: 'all' addresses every instance; give it a name of its own")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not within world_size {self.world_size}")
