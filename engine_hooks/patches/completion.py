# SPDX-License-Identifier: Apache-2.0
"""The scheduler always gets its answer, and a gap between tiers releases nothing twice.

LMCache 0.4.3/0.4.4 answers only if every tier succeeded, and after a gap calls a method of a tuple: the request then
waits for its lookup to time out. Here the answer is the leading run that was loaded, 0 if the load failed; whatever was
loaded behind a gap is released with the rest by the clean-up of the lookup.

Threads: the storage loop.
"""

from __future__ import annotations

import logging
from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")


def leading_chunks(loaded: Any, expected: list[int]) -> int:
    """How many chunks from the start were loaded without a gap."""
    total = 0
    for tier, wanted in zip(loaded, expected, strict=False):
        total += len(tier)
        if len(tier) < wanted:
            break
    return total


def _make(_current: AnyFunction) -> AnyFunction:
    from lmcache.v1.event_manager import EventStatus, EventType

    def prefetch_all_done_callback(
        self: Any, task: Any, lookup_id: str, cum_chunk_lengths_total: list[int], tier_expected_chunks: list[int]
    ) -> None:
        """Mark the load done and tell the scheduler how many tokens it may count on."""
        tokens = 0
        try:
            self.event_manager.update_event_status(EventType.LOADING, lookup_id, status=EventStatus.DONE)
            tokens = cum_chunk_lengths_total[leading_chunks(task.result(), tier_expected_chunks)]
        except BaseException as error:  # a cancelled task raises CancelledError, and the answer must still go out
            logger.error("lookup %s loaded nothing: %s: %s", lookup_id, type(error).__name__, error)
        if self.async_lookup_server is not None:
            self.async_lookup_server.send_response_to_scheduler(lookup_id, tokens)

    return prefetch_all_done_callback


PATCH = Patch(
    name="completion",
    reason="a tier that fails, or a gap between tiers, leaves the request without an answer until it times out",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.storage_manager:StorageManager.prefetch_all_done_callback",
            _make,
            frozenset({"ac3352bb651f0f3d"}),
        ),
    ),
)
