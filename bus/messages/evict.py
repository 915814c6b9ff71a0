# SPDX-License-Identifier: Apache-2.0
"""evict.v1: these chunks will not be read again by this conversation."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import CommandHashes, Flag, Name, Tiers
from semkv.bus.messages.base import Command


class Evict(Command):
    """Remove chunks from `tiers` (absent: the local tiers). `force` overrides what others still use."""

    type: ClassVar[str] = "evict"
    version: ClassVar[int] = 1

    chunk_hashes: CommandHashes
    session: Name | None = None
    tiers: Tiers | None = None
    force: Flag = False
    dry_run: Flag = False
