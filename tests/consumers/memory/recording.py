# SPDX-License-Identifier: Apache-2.0
"""A client of the bus that records what it is asked and answers what it is told: for the rules, not for the bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from semkv.bus.status import HashesStatus


@dataclass
class Asked:
    op: str
    hashes: tuple[int, ...]
    options: dict[str, Any]

    @property
    def command_id(self) -> str:
        return str(self.options["command_id"])


class RecordingHandle:
    def __init__(self, command_id: str, gate: asyncio.Event | None, state: str, loaded: int) -> None:
        self.command_id = command_id
        self.cancelled = False
        self._gate = gate
        self._state = state
        self._loaded = loaded

    async def result(self, timeout: float | None = None) -> Any:
        if self._gate is not None:
            await self._gate.wait()
        rank = SimpleNamespace(
            instance="e0",
            rank=0,
            state=self._state,
            counts={"loaded": self._loaded},
            ran_ms=8.0,
            reason=None,
            bytes_by_tier={"disk": 2_000_000 * self._loaded},
            trace_id="0af7651916cd43dd8448eb211c80319c",
        )
        return SimpleNamespace(state=self._state, results=[rank], unanswered=[])

    async def cancel(self) -> None:
        self.cancelled = True


@dataclass
class RecordingKV:
    asked: list[Asked] = field(default_factory=list)
    handles: list[RecordingHandle] = field(default_factory=list)
    gate: asyncio.Event | None = None
    state: str = "succeeded"
    error: Exception | None = None
    events: list[Any] = field(default_factory=list)
    resumed_with: list[dict[str, Any]] = field(default_factory=list)

    def ops(self) -> list[str]:
        return [asked.op for asked in self.asked]

    def _ask(self, op: str, hashes: Sequence[int], options: dict[str, Any]) -> RecordingHandle:
        if self.error is not None:
            raise self.error
        self.asked.append(Asked(op, tuple(hashes), options))
        handle = RecordingHandle(options["command_id"], self.gate, self.state, len(hashes))
        self.handles.append(handle)
        return handle

    async def prefetch(self, chunk_hashes: Sequence[int], **options: Any) -> RecordingHandle:
        return self._ask("prefetch", chunk_hashes, options)

    async def evict(self, chunk_hashes: Sequence[int], **options: Any) -> RecordingHandle:
        return self._ask("evict", chunk_hashes, options)

    async def retain(self, session: str, chunk_hashes: Sequence[int], **options: Any) -> RecordingHandle:
        return self._ask("retain", chunk_hashes, {**options, "session": session})

    async def release(self, session: str, **options: Any) -> RecordingHandle:
        return self._ask("release", (), {**options, "session": session})

    async def finished(self, **options: Any) -> AsyncIterator[Any]:
        self.resumed_with.append(options)
        for event in self.events:
            yield event


def finished(session: str | None, hashes: Sequence[int], seq: int, **more: Any) -> Any:
    """A finished event as the map reads one."""
    fields: dict[str, Any] = {
        "tenant": "default", "domain": "d0", "instance": "e0", "epoch": 1, "seq": seq, "request_id": f"r{seq}",
        "session": session, "hashes_status": HashesStatus.KNOWN, "chunk_hashes": tuple(hashes), "chunk_size": 256,
        "prompt_tokens": 256 * len(hashes), "finished_at": 1_000_000 + seq,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})
