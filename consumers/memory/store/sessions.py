# SPDX-License-Identifier: Apache-2.0
"""Sessions, their topics and what an agent's tools usually take: the rows that are not chains, notes or decisions.

Called from the map's loop; every method is one short SQLite statement or transaction.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from semkv.consumers.memory.store.database import Database

__all__ = ["Session", "Sessions", "Topic"]

# The newest tool calls weigh this much in the mean: a tool that became slow is noticed within a few calls.
_TOOL_WEIGHT = 0.3


@dataclass(frozen=True)
class Session:
    session: str
    agent: str
    topic: str
    pending: str  # "compacted" until the next chain shows what the compaction dropped
    ended: bool
    updated_at: int


@dataclass(frozen=True)
class Topic:
    session: str
    topic: str
    intent: str
    closed: bool
    updated_at: int


def _session(row: sqlite3.Row) -> Session:
    ended = bool(row["ended"])
    return Session(row["session"], row["agent"], row["topic"], row["pending"], ended, row["updated_at"])


class Sessions:
    """Rows of ``sessions``, ``topics`` and ``tools``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def ensure(self, session: str, agent: str) -> Session:
        """The session's row; a session belongs to the agent that named it first."""
        self._db.execute(
            "INSERT INTO sessions (session, agent, updated_at) VALUES (?, ?, ?) ON CONFLICT (session) DO NOTHING",
            (session, agent, time.time_ns()),
        )
        found = self.get(session)
        assert found is not None
        return found

    def get(self, session: str) -> Session | None:
        row = self._db.one("SELECT * FROM sessions WHERE session = ?", (session,))
        if row is None:
            return None
        return Session(
            row["session"], row["agent"], row["topic"], row["pending"], bool(row["ended"]), row["updated_at"]
        )

    def known(self, agent: str | None = None, limit: int = 1000) -> list[Session]:
        rows = self._db.all(
            "SELECT * FROM sessions WHERE ? IS NULL OR agent = ? ORDER BY updated_at DESC LIMIT ?",
            (agent, agent, limit),
        )
        return [_session(row) for row in rows]

    def claim(self, session: str, agent: str) -> None:
        """Gives a session that an event brought before its agent spoke to that agent."""
        self._db.execute("UPDATE sessions SET agent = ? WHERE session = ?", (agent, session))

    def touch(
        self,
        session: str,
        *,
        topic: str | None = None,
        pending: str | None = None,
        ended: bool | None = None,
        at: int | None = None,
    ) -> None:
        self._db.execute(
            "UPDATE sessions SET topic = COALESCE(?, topic), pending = COALESCE(?, pending), "
            "ended = COALESCE(?, ended), updated_at = MAX(updated_at, ?) WHERE session = ?",
            (topic, pending, None if ended is None else int(ended), at or time.time_ns(), session),
        )

    def forget(self, session: str) -> None:
        """Drops all that is known of a session."""
        with self._db.transaction():
            for table in ("topics", "requests", "chains", "sessions"):
                self._db.execute(f"DELETE FROM {table} WHERE session = ?", (session,))

    def ensure_topic(self, session: str, topic: str, *, intent: str | None = None, at: int | None = None) -> int:
        """The topic's row id; naming a closed topic opens it again."""
        self._db.execute(
            "INSERT INTO topics (session, topic, intent, updated_at) VALUES (?, ?, COALESCE(?, ''), ?) "
            "ON CONFLICT (session, topic) DO UPDATE SET closed = 0, intent = COALESCE(?, intent), "
            "updated_at = MAX(updated_at, excluded.updated_at)",
            (session, topic, intent, at or time.time_ns(), intent),
        )
        row = self._db.one("SELECT id FROM topics WHERE session = ? AND topic = ?", (session, topic))
        assert row is not None
        return int(row["id"])

    def topics(self, session: str) -> list[Topic]:
        rows = self._db.all("SELECT * FROM topics WHERE session = ? ORDER BY updated_at DESC", (session,))
        return [Topic(r["session"], r["topic"], r["intent"], bool(r["closed"]), r["updated_at"]) for r in rows]

    def close_topic(self, session: str, topic: str) -> bool:
        cursor = self._db.execute(
            "UPDATE topics SET closed = 1 WHERE session = ? AND topic = ? AND closed = 0", (session, topic)
        )
        return cursor.rowcount > 0

    def tool_ms(self, agent: str, tool: str) -> float | None:
        """How long this agent's calls of the tool take, newest ones weighing most; None before the first."""
        row = self._db.one("SELECT mean_ms FROM tools WHERE agent = ? AND tool = ?", (agent, tool))
        return None if row is None else float(row["mean_ms"])

    def learn_tool(self, agent: str, tool: str, took_ms: float) -> None:
        self._db.execute(
            "INSERT INTO tools VALUES (?, ?, 1, ?) ON CONFLICT (agent, tool) DO UPDATE SET calls = calls + 1, "
            "mean_ms = mean_ms + ? * (excluded.mean_ms - mean_ms)",
            (agent, tool, took_ms, _TOOL_WEIGHT),
        )
