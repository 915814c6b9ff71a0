# SPDX-License-Identifier: Apache-2.0
"""What the memory map needs of the outside: a client of the bus, an event and a command's handle.

Only shapes, no code: ``semkv.bus`` satisfies them, and so does the simulation. Everything is called from one asyncio
loop. ``prefetch`` and the others raise what the client raises (no live engine, bad hashes); the memory map records
that as the decision's outcome and never lets it reach the agent's turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["KV", "FinishedEvent", "Handle"]


class FinishedEvent(Protocol):
    """The fields of ``finished.v1`` that the map reads."""

    @property
    def tenant(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def session(self) -> str | None: ...
    @property
    def hashes_status(self) -> Any: ...
    @property
    def chunk_hashes(self) -> tuple[int, ...]: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def finished_at(self) -> int: ...


@runtime_checkable
class Handle(Protocol):
    """A command on its way."""

    @property
    def command_id(self) -> str: ...
    async def result(self, timeout: float | None = None) -> Any: ...
    async def cancel(self) -> Any: ...


class KV(Protocol):
    """The four commands and the event stream, as the bus's client has them."""

    async def prefetch(
        self,
        chunk_hashes: Sequence[int],
        *,
        session: str | None = None,
        expires_in_ms: int | None = None,
        budget_bytes: int | None = None,
        domain: str | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> Handle: ...

    async def evict(
        self,
        chunk_hashes: Sequence[int],
        *,
        session: str | None = None,
        tiers: Iterable[str] | None = None,
        domain: str | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> Handle: ...

    async def retain(
        self,
        session: str,
        chunk_hashes: Sequence[int],
        *,
        ttl_s: int = 600,
        domain: str | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> Handle: ...

    async def release(
        self,
        session: str,
        *,
        domain: str | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> Handle: ...

    def finished(self, *, after: int | None = None) -> AsyncIterator[FinishedEvent]: ...
