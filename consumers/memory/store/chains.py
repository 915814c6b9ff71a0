# SPDX-License-Identifier: Apache-2.0
"""The chains of every session: its leaves, the chain each topic ended with, and what other sessions still use.

A new chain replaces the leaf that it extends, is ignored if a leaf already extends it, and is a further leaf
otherwise (a title or a sub-agent's prompt does not replace the conversation's). A session keeps ``MAX_LEAVES`` of them
and each topic's last one. A chain of a request that no session claims yet waits, among ``MAX_WAITING``, for the agent
to name its request. Called from the map's loop.
"""

from __future__ import annotations

import sqlite3
from enum import Enum

from semkv.bus import hashes as codec
from semkv.consumers.memory.chains import Chain, common_prefix, extends
from semkv.consumers.memory.store.database import Database

__all__ = ["MAX_LEAVES", "MAX_WAITING", "Chains", "Kept"]

MAX_LEAVES = 16
MAX_WAITING = 1024
MAX_REQUESTS = 4096

_COLUMNS = (
    "session, topic, tenant, domain, instance, epoch, seq, request_id, root, hashes, chunk_size, prompt_tokens, "
    "finished_at, leaf"
)


class Kept(str, Enum):
    """What became of a chain that was added."""

    LEAF = "leaf"
    EXTENDED = "extended"
    PREFIX = "prefix"
    WAITING = "waiting"


def _chain(row: sqlite3.Row) -> Chain:
    return Chain(
        session=row["session"],
        hashes=codec.unpack(row["hashes"]),
        tenant=row["tenant"],
        domain=row["domain"],
        instance=row["instance"],
        request_id=row["request_id"],
        chunk_size=row["chunk_size"],
        prompt_tokens=row["prompt_tokens"],
        finished_at=row["finished_at"],
        epoch=row["epoch"],
        seq=row["seq"],
        topic=row["topic"],
    )


class Chains:
    """Rows of ``chains`` and ``requests``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, chain: Chain) -> Kept:
        """Keeps a chain that is not empty, all or nothing."""
        if not chain.hashes:
            raise ValueError("chain.hashes: empty; a chain that is not known is not a chain")
        with self._db.transaction():
            if not chain.session:
                self._insert(chain, leaf=False)
                self._db.execute(
                    "DELETE FROM chains WHERE session = '' AND id NOT IN "
                    "(SELECT id FROM chains WHERE session = '' ORDER BY id DESC LIMIT ?)",
                    (MAX_WAITING,),
                )
                return Kept.WAITING
            kept = self._place(chain)
            self._prune(chain.session)
            return kept

    def _place(self, chain: Chain) -> Kept:
        kept = Kept.LEAF
        for row in self._db.all("SELECT * FROM chains WHERE session = ? AND leaf = 1 ORDER BY id", (chain.session,)):
            leaf = _chain(row)
            if leaf.domain != chain.domain or leaf.tenant != chain.tenant:
                continue
            if extends(chain.hashes, leaf.hashes):
                # Kept as the topic's last chain until the prune, no leaf any more.
                self._db.execute("UPDATE chains SET leaf = 0 WHERE id = ?", (row["id"],))
                kept = Kept.EXTENDED
            elif extends(leaf.hashes, chain.hashes):
                kept = Kept.PREFIX
        self._insert(chain, leaf=kept is not Kept.PREFIX)
        return kept

    def _insert(self, chain: Chain, *, leaf: bool) -> None:
        self._db.execute(
            f"INSERT INTO chains ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (chain.session, chain.topic, chain.tenant, chain.domain, chain.instance, chain.epoch, chain.seq,
             chain.request_id, chain.hashes[0], codec.pack(chain.hashes), chain.chunk_size, chain.prompt_tokens,
             chain.finished_at, int(leaf)),
        )  # fmt: skip

    def _prune(self, session: str) -> None:
        self._db.execute(
            "UPDATE chains SET leaf = 0 WHERE session = ? AND leaf = 1 AND id NOT IN "
            "(SELECT id FROM chains WHERE session = ? AND leaf = 1 ORDER BY id DESC LIMIT ?)",
            (session, session, MAX_LEAVES),
        )
        self._db.execute(
            "DELETE FROM chains WHERE session = ? AND leaf = 0 AND id NOT IN "
            "(SELECT MAX(id) FROM chains WHERE session = ? GROUP BY topic, tenant, domain)",
            (session, session),
        )

    def leaves(self, session: str) -> list[Chain]:
        """Newest first."""
        rows = self._db.all("SELECT * FROM chains WHERE session = ? AND leaf = 1 ORDER BY id DESC", (session,))
        return [_chain(row) for row in rows]

    def current(self, session: str) -> Chain | None:
        """The chain the session's next request most likely extends.

        The newest one, unless it is much shorter than the leaf before it and shares less than half of itself with it:
        a title or a summary prompt beside the conversation.
        """
        leaves = self.leaves(session)
        if not leaves:
            return None
        newest = leaves[0]
        for other in leaves[1:]:
            aside = 2 * len(newest.hashes) < len(other.hashes)
            if aside and 2 * common_prefix(newest.hashes, other.hashes) < len(newest.hashes):
                return other
            break
        return newest

    def for_topic(self, session: str, topic: str) -> Chain | None:
        """What to warm to go on with a topic: the newest leaf that contains the topic's last chain, else that chain.

        A conversation is append-only: to go on with its first topic the engine still reads all that came after it.
        """
        row = self._db.one(
            "SELECT * FROM chains WHERE session = ? AND topic = ? ORDER BY id DESC LIMIT 1", (session, topic)
        )
        if row is None:
            return None
        last = _chain(row)
        for leaf in self.leaves(session):
            if (leaf.tenant, leaf.domain) == (last.tenant, last.domain) and extends(leaf.hashes, last.hashes):
                return leaf
        return last

    def own(self, session: str, topic: str) -> list[Chain]:
        """Every chain kept under exactly this topic."""
        rows = self._db.all("SELECT * FROM chains WHERE session = ? AND topic = ? ORDER BY id DESC", (session, topic))
        return [_chain(row) for row in rows]

    def sharing(self, chain: Chain, *, but_session: str | None = None) -> list[Chain]:
        """Leaves of other sessions that begin with the same chunk, so that they share a prefix with the chain."""
        rows = self._db.all(
            "SELECT * FROM chains WHERE root = ? AND leaf = 1 AND tenant = ? AND domain = ? AND session != ?",
            (chain.hashes[0], chain.tenant, chain.domain, but_session or ""),
        )
        return [_chain(row) for row in rows]

    def name_request(self, request_id: str, session: str, topic: str, at: int) -> Chain | None:
        """Remembers whose request this is; a chain that waited for it is adopted and returned."""
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO requests VALUES (?, ?, ?, ?) ON CONFLICT (request_id) DO UPDATE SET "
                "session = excluded.session, topic = excluded.topic",
                (request_id, session, topic, at),
            )
            self._db.execute(
                "DELETE FROM requests WHERE request_id NOT IN "
                "(SELECT request_id FROM requests ORDER BY at DESC LIMIT ?)",
                (MAX_REQUESTS,),
            )
            row = self._db.one("SELECT * FROM chains WHERE request_id = ? ORDER BY id DESC LIMIT 1", (request_id,))
            if row is None:
                return None
            if row["session"] == session:
                self._db.execute("UPDATE chains SET topic = ? WHERE id = ?", (topic, row["id"]))
                return None
            if row["session"]:
                return None
            self._db.execute("DELETE FROM chains WHERE id = ?", (row["id"],))
            waiting = _chain(row)
        return Chain(**{**waiting.__dict__, "session": session, "topic": topic})

    def of_request(self, request_id: str) -> Chain | None:
        """The chain that a request brought, while it is kept."""
        row = self._db.one("SELECT * FROM chains WHERE request_id = ? ORDER BY id DESC LIMIT 1", (request_id,))
        return None if row is None else _chain(row)

    def owner(self, request_id: str) -> tuple[str, str] | None:
        """(session, topic) of a request that the agent named before its event came."""
        row = self._db.one("SELECT session, topic FROM requests WHERE request_id = ?", (request_id,))
        return None if row is None else (row["session"], row["topic"])

    def drop(self, chain: Chain) -> None:
        """Forgets a chain that is over, in its session."""
        self._db.execute(
            "DELETE FROM chains WHERE session = ? AND domain = ? AND hashes = ?",
            (chain.session, chain.domain, codec.pack(chain.hashes)),
        )
