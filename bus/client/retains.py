# SPDX-License-Identifier: Apache-2.0
"""What a client retains, so that it can be asked for again when an engine process is replaced.

As on a rank, a retain takes the place of what was kept for its session, on the engines that it addresses. One event
loop; no errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from semkv.bus import subjects
from semkv.bus.messages import EngineInfo

_SLACK_S = 1.0


@dataclass(frozen=True)
class Retained:
    """One retain that still holds; `instance` is None for every engine of the domain."""

    session: str
    domain: str
    instance: str | None
    hashes: tuple[int, ...]
    until: float
    """Loop time."""

    @property
    def ttl_s(self) -> int:
        """What is left of it."""
        return max(1, int(self.until - asyncio.get_running_loop().time()))


class Retains:
    """All that one client retains, by session."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[Retained]] = {}

    def add(self, session: str, domain: str, instance: str | None, hashes: tuple[int, ...], ttl_s: float) -> None:
        """Notes a retain that was published."""
        now = asyncio.get_running_loop().time()
        for other in list(self._sessions):  # what is over leaves with it
            self._keep(other, [entry for entry in self._sessions[other] if entry.until > now])
        entries = [
            entry
            for entry in self._sessions.get(session, [])
            if entry.domain != domain or instance not in (None, entry.instance)
        ]
        self._keep(session, [*entries, Retained(session, domain, instance, hashes, now + ttl_s)])

    def _keep(self, session: str, entries: list[Retained]) -> None:
        if entries:
            self._sessions[session] = entries
        else:
            self._sessions.pop(session, None)

    def drop(self, session: str) -> str | None:
        """Forgets a session; gives the domain of its newest retain."""
        entries = self._sessions.pop(session, [])
        return entries[-1].domain if entries else None

    def of(self, info: EngineInfo) -> Iterator[Retained]:
        """What this engine should keep."""
        soon = asyncio.get_running_loop().time() + _SLACK_S
        token = subjects.token(info.instance)
        for entries in list(self._sessions.values()):
            for entry in entries:
                meant = entry.instance is None or subjects.stands_for(entry.instance, token)
                if meant and entry.domain == info.domain and entry.until > soon:
                    yield entry
