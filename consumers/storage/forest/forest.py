# SPDX-License-Identifier: Apache-2.0
"""The prefix forest: what makes an evict safe for everybody who did not ask for it.

Fed from the lookups this rank serves, so that running requests count and nothing depends on a message. An evict may
take a chunk only if no conversation but the exempt ones goes through it and nobody retains it. Exempt are, with a
session, that session's leaves; without, at most one leaf: of the leaves without a session that end in the evicted set
and whose requests have ended, the longest, and only if the set names no chunk behind its end (whoever names one
speaks of a longer conversation, not of this one).

Where an engine stores what is left behind the last whole chunk, this *tail* is no part of a chain: the next turn has
another one. It is safe as a chunk is while its conversation's last turn has it, and nobody's afterwards.

A chunk remembers the tenants whose chains used it and does not exist for others. A chunk never looked up belongs to the
engine's own tenant, as long as no other tenant was ever seen.

Threads: any; one lock, held for microseconds. Errors: none; empty chains are ignored.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from semkv.consumers.storage.forest.leaves import Leaf, Leaves
from semkv.consumers.storage.forest.nodes import Nodes
from semkv.consumers.storage.forest.retains import Retains

IDLE_S = 3600.0
RUNNING_S = 6 * 3600.0
LEAVES_PER_SESSION = 16
DEAD_LIMIT = 200_000
RETAIN_LIMIT = 1_000_000


class PrefixForest:
    """Conversations and what they need, for one rank."""

    def __init__(
        self,
        tenant: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = IDLE_S,
        running_s: float = RUNNING_S,
        leaves_per_session: int = LEAVES_PER_SESSION,
        dead_limit: int = DEAD_LIMIT,
    ) -> None:
        """`tenant` is the engine's own (default: SEMKV_TENANT, else `default`)."""
        self.tenant = tenant or os.environ.get("SEMKV_TENANT") or "default"
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes = Nodes(dead_limit)
        self._leaves = Leaves(self._nodes, per_session=leaves_per_session, idle_s=idle_s, running_s=running_s)
        self._retains = Retains(RETAIN_LIMIT)
        self._others_seen = False

    def record_lookup(
        self,
        tenant: str | None,
        session: str | None,
        hashes: Sequence[int],
        request_id: str,
        running: bool = True,
        *,
        tail: int | None = None,
    ) -> None:
        """A request with this chain of whole chunks was looked up; `tail` is the chunk in part behind them, if any."""
        if not hashes:
            return
        tenant = tenant or self.tenant
        now = self._clock()
        with self._lock:
            self._leaves.expire(now)
            self._others_seen = self._others_seen or tenant != self.tenant
            self._leaves.record(tenant, session, hashes, request_id, now, running=running, tail=tail)

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        now = self._clock()
        with self._lock:
            for request_id in request_ids:
                self._leaves.finished(request_id, now)

    def visible(self, tenant: str, chunk_hash: int) -> bool:
        """Whether the chunk exists for this tenant."""
        with self._lock:
            return self._visible(tenant, chunk_hash)

    def _visible(self, tenant: str, chunk_hash: int) -> bool:
        node = self._nodes.find(chunk_hash)
        if node is None:
            return tenant == self.tenant and not self._others_seen
        return self._nodes.used_by(node, tenant)

    def idle(self, chunk_hash: int) -> bool:
        """True if no conversation goes through the chunk."""
        with self._lock:
            node = self._nodes.find(chunk_hash)
            return node is None or self._nodes.count_of(node) == 0

    def retained(self, chunk_hash: int) -> bool:
        """True if somebody keeps the chunk."""
        with self._lock:
            self._retains.expire(self._clock())
            return chunk_hash in self._retains

    def shared(self, tenant: str, session: str | None, hashes: Sequence[int]) -> frozenset[int]:
        """Those of `hashes` that an evict by this tenant and session must leave alone."""
        now = self._clock()
        with self._lock:
            self._leaves.expire(now)
            self._retains.expire(now)
            nodes = {chunk_hash: self._nodes.find(chunk_hash) for chunk_hash in hashes}
            exempt = self._exempt(tenant, session, [node for node in nodes.values() if node is not None])
            less: dict[int, int] = {}
            for leaf in exempt:
                for node in self._leaves.nodes_of(leaf):
                    less[node] = less.get(node, 0) + 1
            return frozenset(
                chunk_hash
                for chunk_hash, node in nodes.items()
                if chunk_hash in self._retains
                or (node is not None and (self._nodes.is_odd(node) or self._nodes.count_of(node) > less.get(node, 0)))
            )

    def _exempt(self, tenant: str, session: str | None, nodes: list[int]) -> tuple[Leaf, ...]:
        if session is not None:
            return self._leaves.of_session(tenant, session)
        continued = {self._nodes.parent_of(node) for node in nodes if not self._nodes.is_tail(node)}
        ending = [
            leaf
            for node in nodes
            if node not in continued
            for leaf in self._leaves.anonymous_at(tenant, node)
            if not leaf.running
        ]
        named = set(nodes)
        longest = max(ending, key=lambda leaf: (leaf.length, leaf.tail in named), default=None)
        return () if longest is None else (longest,)

    def retain(self, tenant: str, client: str, session: str, hashes: Sequence[int], ttl_s: float) -> tuple[int, ...]:
        """Keep chunks for a while, instead of what this holder kept so far; returns those that are kept."""
        now = self._clock()
        with self._lock:
            self._retains.expire(now)
            seen = [chunk_hash for chunk_hash in hashes if self._visible(tenant, chunk_hash)]
            return tuple(self._retains.hold((tenant, client, session), seen, ttl_s, now))

    def release(self, tenant: str, client: str, session: str) -> int:
        """End what this holder keeps; returns how many chunks that was."""
        with self._lock:
            return self._retains.drop((tenant, client, session))

    def stats(self) -> dict[str, int]:
        """How much there is of everything."""
        now = self._clock()
        with self._lock:
            self._leaves.expire(now)
            self._retains.expire(now)
            return {
                "chunks": len(self._nodes),
                "live_chunks": self._nodes.live,
                "conversations": len(self._leaves),
                "sessions": self._leaves.sessions,
                "running": self._leaves.running,
                "retained": len(self._retains),
                "anomalies": self._nodes.anomalies,
            }
