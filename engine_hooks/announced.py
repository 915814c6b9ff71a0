# SPDX-License-Identifier: Apache-2.0
"""Feeds the registry's announcements of this engine's ranks into an `Agreement`, on the publisher's loop."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any

from semkv.bus import subjects
from semkv.bus.connection import Link
from semkv.bus.registry import EngineRegistry
from semkv.engine_hooks.agreement import Agreement, AgreementState, RankAnnouncement

WAITING_S = 0.1
SETTLED_S = 1.0


class Announced:
    """`async with Announced(...)`: the agreement follows the registry inside the block. Without one it does nothing."""

    def __init__(self, connection: Any, link: Link, instance: str, agreement: Agreement | None) -> None:
        self._registry = EngineRegistry(connection, link)
        self._token = subjects.token(instance)
        self._agreement = agreement
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Announced:
        if self._agreement is not None:
            await self._registry.start()
            self._task = asyncio.create_task(self._follow(self._agreement))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    async def _follow(self, agreement: Agreement) -> None:
        while True:
            state = agreement.update(
                RankAnnouncement(info.rank, str(info.role), info.hash_domain)
                for info in self._registry.live()
                if subjects.token(info.instance) == self._token
            )
            await asyncio.sleep(WAITING_S if state is AgreementState.WAITING else SETTLED_S)
