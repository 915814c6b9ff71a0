# SPDX-License-Identifier: Apache-2.0
"""accepted.v1: one rank has read a command and will answer it."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Count, Millis, Name, OpField, Token
from semkv.bus.messages.base import TenantMessage


class Accepted(TenantMessage):
    """First answer of a rank, on the same subject as its result."""

    type: ClassVar[str] = "accepted"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "res"

    command_id: Token
    client: Name
    op: OpField
    rank: Count
    epoch: Count
    queued_ms: Millis
