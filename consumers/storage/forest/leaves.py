# SPDX-License-Identifier: Apache-2.0
"""Conversations: the leaves of sessions, and without a session one request's chain each.

A chain replaces a leaf only if it extends it: within its own session, or, without a session, exactly one leaf of the
same tenant whose requests have ended. Every other leaf of a session stays, up to a bound. A chain that a leaf of its
session already covers only refreshes that leaf. The children of one request with n > 1 are one conversation.

Threads: none of its own; the forest holds its lock around every call.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from semkv.consumers.storage.forest.nodes import NO_PARENT, Nodes

_CHILD = re.compile(r"\d+_(?=.)")


def parent_request(request_id: str) -> str:
    """The request that vLLM split into n children (named `<number>_<request>`), or the request itself."""
    return _CHILD.sub("", request_id, count=1) if _CHILD.match(request_id) else request_id


class Leaf:
    """One conversation: its chain, when it was last used, and which of its requests run."""

    __slots__ = ("families", "last_used", "length", "listed", "running", "session", "tail", "tenant", "tip")

    def __init__(self, tenant: str, session: str | None) -> None:
        self.tenant = tenant
        self.session = session
        self.tip = NO_PARENT
        self.tail: int | None = None  # the node behind the last whole chunk, where there is one
        self.length = 0
        self.listed: list[int] | None = None  # the nodes themselves, where parents do not lead along this chain
        self.last_used = 0.0
        self.running: set[str] = set()
        self.families: set[str] = set()  # requests split into children, of which more may still be looked up


class Leaves:
    """All conversations that are alive, oldest use first."""

    def __init__(self, nodes: Nodes, *, per_session: int, idle_s: float, running_s: float) -> None:
        self._nodes = nodes
        self._per_session = per_session
        self._idle_s = idle_s
        self._running_s = running_s
        self._by_age: OrderedDict[int, Leaf] = OrderedDict()
        self._sessions: dict[tuple[str, str], list[Leaf]] = {}
        self._anonymous: dict[tuple[str, int], list[Leaf]] = {}
        self._requests: dict[str, Leaf] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def sessions(self) -> int:
        """How many sessions have a leaf."""
        return len(self._sessions)

    @property
    def running(self) -> int:
        """How many requests run."""
        return sum(len(leaf.running) for leaf in self._by_age.values())

    def of_session(self, tenant: str, session: str) -> tuple[Leaf, ...]:
        """The leaves of one session."""
        return tuple(self._sessions.get((tenant, session), ()))

    def anonymous_at(self, tenant: str, node: int) -> tuple[Leaf, ...]:
        """The tenant's leaves without a session that end at this node."""
        return tuple(self._anonymous.get((tenant, node), ()))

    def nodes_of(self, leaf: Leaf) -> Iterator[int]:
        """The nodes that a leaf needs: its chain's, and its tail."""
        chain = iter(leaf.listed) if leaf.listed is not None else self._nodes.walk(leaf.tip, leaf.length)
        return chain if leaf.tail is None else itertools.chain(chain, (leaf.tail,))

    def record(
        self,
        tenant: str,
        session: str | None,
        hashes: Sequence[int],
        request: str,
        now: float,
        *,
        running: bool,
        tail: int | None = None,
    ) -> None:
        """A request with this chain came."""
        base = parent_request(request)
        known = self._requests.get(request) or self._requests.get(base)
        if known is not None and (known.tenant, known.session) != (tenant, session):
            known = None
        leaf = self._covering(tenant, session, hashes, known)
        if leaf is None:
            leaf = self._extended(tenant, session, hashes, known) or self._add(tenant, session)
            self._lengthen(leaf, hashes)
        if tail is not None:
            self._end_with(leaf, hashes, tail)
        self._touch(leaf, now)
        if running:
            leaf.running.add(request)
            self._requests[request] = leaf
            if base != request and self._requests.setdefault(base, leaf) is leaf:
                leaf.families.add(base)
        if session is not None:
            self._drop_surplus((tenant, session), keep=leaf)

    def finished(self, request: str, now: float) -> None:
        """A request ended, whichever way."""
        leaf = self._requests.pop(request, None)
        if leaf is None:
            return
        leaf.running.discard(request)
        self._touch(leaf, now)

    def expire(self, now: float) -> None:
        """Drop the leaves that nobody has used for long."""
        for leaf in list(self._stale(now)):
            self._drop(leaf)

    def _stale(self, now: float) -> Iterator[Leaf]:
        for leaf in self._by_age.values():
            if now - leaf.last_used < self._idle_s:
                return
            if not leaf.running or now - leaf.last_used >= self._running_s:
                yield leaf

    def _covers(self, leaf: Leaf, hashes: Sequence[int]) -> bool:
        surplus = leaf.length - len(hashes)
        if surplus < 0:
            return False
        listed = leaf.listed
        node = listed[len(hashes) - 1] if listed is not None else self._nodes.up(leaf.tip, surplus)
        return self._nodes.hash_of(node) == hashes[-1]

    def _extends(self, leaf: Leaf, hashes: Sequence[int]) -> bool:
        return leaf.length < len(hashes) and self._nodes.hash_of(leaf.tip) == hashes[leaf.length - 1]

    def _covering(self, tenant: str, session: str | None, hashes: Sequence[int], known: Leaf | None) -> Leaf | None:
        """The leaf that already stands for this chain."""
        if known is not None and self._covers(known, hashes):
            return known
        if session is None:
            return None
        for leaf in reversed(self._sessions.get((tenant, session), ())):
            if self._covers(leaf, hashes):
                return leaf
        return None

    def _extended(self, tenant: str, session: str | None, hashes: Sequence[int], known: Leaf | None) -> Leaf | None:
        """The leaf that this chain replaces."""
        if known is not None and self._extends(known, hashes):
            return known
        if session is not None:
            matching = [leaf for leaf in self._sessions.get((tenant, session), ()) if self._extends(leaf, hashes)]
            return max(matching, key=lambda leaf: leaf.length, default=None)
        for chunk_hash in reversed(hashes[:-1]):
            node = self._nodes.find(chunk_hash)
            for leaf in self._anonymous.get((tenant, node), ()) if node is not None else ():
                if not leaf.running and self._extends(leaf, hashes):
                    return leaf
        return None

    def _add(self, tenant: str, session: str | None) -> Leaf:
        leaf = Leaf(tenant, session)
        if session is not None:
            self._sessions.setdefault((tenant, session), []).append(leaf)
        return leaf

    def _lengthen(self, leaf: Leaf, hashes: Sequence[int]) -> None:
        self._unplace(leaf)
        self._cut_tail(leaf)
        nodes, node, tenant = self._nodes, leaf.tip, leaf.tenant
        for chunk_hash in hashes[leaf.length :]:
            entered, same = nodes.enter(chunk_hash, node, tenant)
            if not same and leaf.listed is None:
                leaf.listed = list(nodes.walk(node, leaf.length))[::-1]
            if leaf.listed is not None:
                leaf.listed.append(entered)
            node = entered
            leaf.length += 1
        leaf.tip = node
        if leaf.session is None:
            self._anonymous.setdefault((leaf.tenant, leaf.tip), []).append(leaf)

    def _end_with(self, leaf: Leaf, hashes: Sequence[int], tail: int) -> None:
        """A request with this chain, which the leaf covers, has this tail; the leaf keeps that of its last turn."""
        if len(hashes) < leaf.length:
            known = self._nodes.find(hashes[-1])
            if known is not None:  # only to remember whose it was
                self._nodes.leave(self._nodes.enter_tail(tail, known, leaf.tenant))
            return
        entered = self._nodes.enter_tail(tail, leaf.tip, leaf.tenant)
        self._cut_tail(leaf)
        leaf.tail = entered

    def _cut_tail(self, leaf: Leaf) -> None:
        if leaf.tail is not None:
            self._nodes.leave(leaf.tail)
            leaf.tail = None

    def _unplace(self, leaf: Leaf) -> None:
        if leaf.session is not None or leaf.length == 0:
            return
        place = (leaf.tenant, leaf.tip)
        others = self._anonymous[place]
        others.remove(leaf)
        if not others:
            del self._anonymous[place]

    def _touch(self, leaf: Leaf, now: float) -> None:
        leaf.last_used = now
        self._by_age[id(leaf)] = leaf
        self._by_age.move_to_end(id(leaf))
        if leaf.session is not None:
            siblings = self._sessions[leaf.tenant, leaf.session]
            if siblings[-1] is not leaf:
                siblings.remove(leaf)
                siblings.append(leaf)

    def _drop_surplus(self, session: tuple[str, str], keep: Leaf) -> None:
        leaves = self._sessions[session]
        while len(leaves) > self._per_session:
            quiet = [leaf for leaf in leaves if not leaf.running and leaf is not keep]
            self._drop(quiet[0] if quiet else next(leaf for leaf in leaves if leaf is not keep))

    def _drop(self, leaf: Leaf) -> None:
        for node in list(self.nodes_of(leaf)):
            self._nodes.leave(node)
        self._unplace(leaf)
        del self._by_age[id(leaf)]
        if leaf.session is not None:
            siblings = self._sessions[leaf.tenant, leaf.session]
            siblings.remove(leaf)
            if not siblings:
                del self._sessions[leaf.tenant, leaf.session]
        for request in leaf.running | leaf.families:
            if self._requests.get(request) is leaf:
                del self._requests[request]
