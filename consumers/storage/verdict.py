# SPDX-License-Identifier: Apache-2.0
"""From the chunks' statuses to what an operation says as a whole.

Pure functions; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from semkv.bus.status import ChunkStatus, State, Tier

GOOD = (ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE)


@functools.cache
def step_name(tier: Tier) -> str:
    """The step of loads from a tier."""
    return f"kv.tier.load {tier}→cpu"


def leading(statuses: Sequence[ChunkStatus]) -> int:
    """How many chunks from the first on are usable."""
    return next((index for index, status in enumerate(statuses) if status not in GOOD), len(statuses))


def end_state(statuses: Sequence[ChunkStatus], good: Sequence[ChunkStatus] = GOOD) -> State:
    """`succeeded` if every chunk ended well, `failed` if none did and something broke, else `partial`."""
    fine = sum(status in good for status in statuses)
    if fine == len(statuses):
        return State.SUCCEEDED
    broken = any(status is ChunkStatus.FAILED for status in statuses)
    return State.FAILED if broken and not fine else State.PARTIAL
