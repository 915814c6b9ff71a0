# SPDX-License-Identifier: Apache-2.0
"""Ending tasks for certain.

A cancellation can get lost: `asyncio.wait_for` drops it when its inner future ends at the same instant (before Python
3.12), and a loop that retries on time-outs then goes on for ever. So a task is cancelled until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.05


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels and waits; what the tasks raise is dropped."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()
