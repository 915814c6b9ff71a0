# SPDX-License-Identifier: Apache-2.0
"""Chunks as nodes of a forest of prefixes: hash to index, and per index parent, count and tenants, in flat arrays.

A node's count is the number of conversations whose chain goes through it. A node that nobody's chain goes through any
more is dead: it is kept for a while, because a chunk remembers the tenants that used it, and its index is used again
once there are too many of them.

Threads: none of its own; the forest holds its lock around every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NO_PARENT = 0xFFFFFFFF


class TenantSets:
    """Interned sets of tenants, so that a chunk's set is one small number."""

    def __init__(self) -> None:
        self._sets: list[frozenset[str]] = [frozenset()]
        self._numbers: dict[frozenset[str], int] = {frozenset(): 0}

    def with_tenant(self, number: int, tenant: str) -> int:
        """The number of the set `number` with one more tenant."""
        known = self._sets[number]
        if tenant in known:
            return number
        grown = known | {tenant}
        found = self._numbers.get(grown)
        if found is None:
            found = len(self._sets)
            self._sets.append(grown)
            self._numbers[grown] = found
        return found

    def has(self, number: int, tenant: str) -> bool:
        """Whether the tenant is in the set `number`."""
        return tenant in self._sets[number]


class Nodes:
    """The chunks that conversations use or used."""

    def __init__(self, dead_limit: int) -> None:
        self._dead_limit = dead_limit
        self._index: dict[int, int] = {}
        self._hash = array("q")
        self._parent = array("I")
        self._count = array("I")
        self._tenants = array("I")
        self._sets = TenantSets()
        self._dead: dict[int, None] = {}
        self._free: list[int] = []
        self._odd: set[int] = set()
        self._tails: set[int] = set()
        self.anomalies = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def live(self) -> int:
        """How many chunks some conversation's chain goes through."""
        return len(self._index) - len(self._dead)

    def find(self, chunk_hash: int) -> int | None:
        """The node of a hash, None if it was never seen or is forgotten."""
        return self._index.get(chunk_hash)

    def hash_of(self, node: int) -> int:
        """The hash of a node."""
        return self._hash[node]

    def parent_of(self, node: int) -> int:
        """The node before this one, `NO_PARENT` at the head of a chain."""
        return self._parent[node]

    def count_of(self, node: int) -> int:
        """How many conversations go through the node."""
        return self._count[node]

    def is_odd(self, node: int) -> bool:
        """True if this hash was seen behind two different prefixes: not to be trusted, so never evicted unforced."""
        return node in self._odd

    def is_tail(self, node: int) -> bool:
        """True if this is what was left behind the last whole chunk of a prompt."""
        return node in self._tails

    def enter_tail(self, chunk_hash: int, parent: int, tenant: str) -> int:
        """Let one more conversation have this behind its last whole chunk; the node."""
        node, _ = self.enter(chunk_hash, parent, tenant)
        self._tails.add(node)
        return node

    def used_by(self, node: int, tenant: str) -> bool:
        """Whether a chain of this tenant ever went through the node."""
        return self._sets.has(self._tenants[node], tenant)

    def enter(self, chunk_hash: int, parent: int, tenant: str) -> tuple[int, bool]:
        """Let one more conversation go through a chunk; the node, and whether its recorded parent is this one."""
        node = self._index.get(chunk_hash)
        if node is None:
            node = self._new(chunk_hash, parent)
        elif self._count[node] == 0:
            self._dead.pop(node, None)
            self._parent[node] = parent
        same = self._parent[node] == parent
        if not same:
            self._odd.add(node)
            self.anomalies += 1
        self._count[node] += 1
        tenants = self._tenants[node]
        if not self._sets.has(tenants, tenant):
            self._tenants[node] = self._sets.with_tenant(tenants, tenant)
        return node, same

    def leave(self, node: int) -> None:
        """One conversation fewer goes through a chunk."""
        self._count[node] -= 1
        if self._count[node] == 0:
            self._odd.discard(node)
            self._dead[node] = None
            while len(self._dead) > self._dead_limit:
                self._forget(next(iter(self._dead)))

    def up(self, node: int, steps: int) -> int:
        """The node that many steps nearer to the head."""
        parent = self._parent
        for _ in range(steps):
            node = parent[node]
        return node

    def walk(self, node: int, length: int) -> Iterator[int]:
        """The nodes of a chain of that length, from its end to its head."""
        parent = self._parent
        for _ in range(length):
            yield node
            node = parent[node]

    def _new(self, chunk_hash: int, parent: int) -> int:
        if self._free:
            node = self._free.pop()
            self._hash[node], self._parent[node], self._count[node], self._tenants[node] = chunk_hash, parent, 0, 0
        else:
            node = len(self._hash)
            self._hash.append(chunk_hash)
            self._parent.append(parent)
            self._count.append(0)
            self._tenants.append(0)
        self._index[chunk_hash] = node
        return node

    def _forget(self, node: int) -> None:
        del self._dead[node]
        self._tails.discard(node)
        del self._index[self._hash[node]]
        self._free.append(node)
