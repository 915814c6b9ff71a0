# SPDX-License-Identifier: Apache-2.0
"""finished.v1: a request has ended in an engine; these are the chunks of its prompt."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Count, EventHashes, HashesStatusField, Name, Positive, Reason, Text
from semkv.bus.messages.base import TenantMessage


class Finished(TenantMessage):
    """What a request left behind. `seq` counts this tenant's events of (instance, epoch): a gap is a loss."""

    type: ClassVar[str] = "finished"
    version: ClassVar[int] = 1
    kind: ClassVar[str] = "evt"

    epoch: Count
    seq: Count
    request_id: Name
    engine_request_id: Name
    index: Count = 0
    session: Name | None = None
    finish_reason: Text
    hashes_status: HashesStatusField
    reason: Reason | None = None
    chunk_hashes: EventHashes = ()
    part: Positive = 1
    parts: Positive = 1
    chunk_size: Positive
    prompt_tokens: Count
    lmcache_hit_tokens: Count | None = None
    engine_cached_tokens: Count | None = None
    generated_tokens: Count
    arrived_at: Count
    finished_at: Count
