# SPDX-License-Identifier: Apache-2.0
"""A forest that knows no conversations: for tests of what storage does by itself."""

from __future__ import annotations


class Nobody:
    """Everything is visible, idle and unshared; `keep` is retained."""

    def __init__(self) -> None:
        self.keep: set[int] = set()
        self.alive: set[int] = set()
        self.hidden: set[int] = set()

    def visible(self, tenant: str, chunk_hash: int) -> bool:
        return chunk_hash not in self.hidden

    def idle(self, chunk_hash: int) -> bool:
        return chunk_hash not in self.alive

    def retained(self, chunk_hash: int) -> bool:
        return chunk_hash in self.keep

    def shared(self, tenant: str, session: str | None, hashes: tuple[int, ...]) -> frozenset[int]:
        return frozenset(self.alive & set(hashes))

    def retain(self, tenant: str, client: str, session: str, hashes: tuple[int, ...], ttl_s: float) -> tuple[int, ...]:
        self.keep.update(hashes)
        return hashes

    def release(self, tenant: str, client: str, session: str) -> int:
        count = len(self.keep)
        self.keep.clear()
        return count
