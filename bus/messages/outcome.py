# SPDX-License-Identifier: Apache-2.0
"""outcome.v1: what became of the chunks a prefetch loaded."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Count, Signed, Token
from semkv.bus.messages.base import TenantMessage


class Outcome(TenantMessage):
    """Counts of chunks by fate. `lead_ms` is how long before its first use the first chunk was there."""

    type: ClassVar[str] = "outcome"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "evt"

    command_id: Token
    rank: Count
    useful: Count = 0
    redundant: Count = 0
    late: Count = 0
    wasted: Count = 0
    bytes: Count = 0
    lead_ms: Signed = 0.0
