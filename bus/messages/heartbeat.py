# SPDX-License-Identifier: Apache-2.0
"""heartbeat.v1: the last sequence number of a tenant's events, so that a loss at the tail shows."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Count
from semkv.bus.messages.base import TenantMessage


class Heartbeat(TenantMessage):
    """Sent while a publisher is alive; `last_seq` is the seq of the tenant's newest event of this epoch."""

    type: ClassVar[str] = "heartbeat"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "evt"

    epoch: Count
    last_seq: Count
