# SPDX-License-Identifier: Apache-2.0
"""prefetch.v1: bring these chunks into a faster tier, in time or not at all."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import CommandHashes, Count, Flag, Name, OrderField, TierField
from semkv.bus.messages.base import Command
from semkv.bus.status import Order, Tier


class Prefetch(Command):
    """Load chunks into `tier`. `expires_in_ms` counts from the stream's timestamp of the command."""

    type: ClassVar[str] = "prefetch"
    version: ClassVar[int] = 1

    chunk_hashes: CommandHashes
    session: Name | None = None
    order: OrderField = Order.PREFIX
    tier: TierField = Tier.CPU
    expires_in_ms: Count | None = None
    budget_bytes: Count | None = None
    dry_run: Flag = False
