# SPDX-License-Identifier: Apache-2.0
"""What clients asked to keep: per (tenant, client, session) a set of chunks and the time until which it holds.

A second `retain` of the same holder replaces its first. Both the time and the number of chunks are bounded.

Threads: none of its own; the forest holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_TTL_S = 24 * 3600.0
Holder = tuple[str, str, str]


class Retains:
    """Chunks that are kept, counted over their holders."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: dict[Holder, tuple[float, frozenset[int]]] = {}
        self._counts: dict[int, int] = {}
        self._next_end = float("inf")

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, chunk_hash: int) -> bool:
        return chunk_hash in self._counts

    def hold(self, holder: Holder, hashes: Iterable[int], ttl_s: float, now: float) -> frozenset[int]:
        """Keep these until `ttl_s` from now; returns those that are kept, fewer where the bound is reached."""
        self.drop(holder)
        kept: set[int] = set()
        for chunk_hash in hashes:
            if chunk_hash not in self._counts and len(self._counts) >= self._limit:
                continue
            if chunk_hash not in kept:
                kept.add(chunk_hash)
                self._counts[chunk_hash] = self._counts.get(chunk_hash, 0) + 1
        if kept and ttl_s > 0:
            end = now + min(ttl_s, MAX_TTL_S)
            self._holders[holder] = (end, frozenset(kept))
            self._next_end = min(self._next_end, end)
        else:
            self._discount(kept)
            kept.clear()
        return frozenset(kept)

    def drop(self, holder: Holder) -> int:
        """End what this holder keeps; how many chunks that was."""
        _, hashes = self._holders.pop(holder, (0.0, frozenset[int]()))
        self._discount(hashes)
        return len(hashes)

    def expire(self, now: float) -> None:
        """End what is over."""
        if now < self._next_end:
            return
        for holder, (end, _) in list(self._holders.items()):
            if end <= now:
                self.drop(holder)
        self._next_end = min((end for end, _ in self._holders.values()), default=float("inf"))

    def _discount(self, hashes: Iterable[int]) -> None:
        for chunk_hash in hashes:
            left = self._counts[chunk_hash] - 1
            if left:
                self._counts[chunk_hash] = left
            else:
                del self._counts[chunk_hash]
