# SPDX-License-Identifier: Apache-2.0
"""Every decision of the policy, also the one to do nothing, with its reason and what became of it.

Bounded to the newest ``MAX_DECISIONS``. What the per-agent budgets count is read from here, so that a restart does
not refill them. Called from the map's loop; ``semkv why`` opens the same file read-only in effect.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semkv.consumers.memory.store.database import Database

__all__ = ["MAX_DECISIONS", "Decision", "Decisions"]

MAX_DECISIONS = 20_000


@dataclass(frozen=True)
class Decision:
    """What was decided at one moment and why."""

    id: int
    command_id: str | None
    at: int
    agent: str
    session: str
    moment: str
    moment_id: str
    action: str
    reason: str
    chunks: int
    chain_digest: str
    details: Mapping[str, Any]
    outcome: str
    result: Mapping[str, Any]

    @property
    def acted(self) -> bool:
        """Whether a command was published for it."""
        return self.command_id is not None


def _decision(row: sqlite3.Row) -> Decision:
    return Decision(
        id=row["id"], command_id=row["command_id"], at=row["at"], agent=row["agent"], session=row["session"],
        moment=row["moment"], moment_id=row["moment_id"], action=row["action"], reason=row["reason"],
        chunks=row["chunks"], chain_digest=row["chain_digest"], details=json.loads(row["details"]),
        outcome=row["outcome"], result=json.loads(row["result"]) if row["result"] else {},
    )  # fmt: skip


class Decisions:
    """Rows of ``decisions``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def record(self, *, command_id: str | None, agent: str, session: str, moment: str, moment_id: str, action: str,
               reason: str, chunks: int = 0, chain_digest: str = "", details: Mapping[str, Any] | None = None,
               outcome: str = "", at: int | None = None) -> Decision:  # fmt: skip
        with self._db.transaction():
            cursor = self._db.execute(
                "INSERT INTO decisions (command_id, at, agent, session, moment, moment_id, action, reason, chunks, "
                "chain_digest, details, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (command_id, at or time.time_ns(), agent, session, moment, moment_id, action, reason, chunks,
                 chain_digest, json.dumps(dict(details or {}), ensure_ascii=False, default=str), outcome),
            )  # fmt: skip
            self._db.execute("DELETE FROM decisions WHERE id <= ?", ((cursor.lastrowid or 0) - MAX_DECISIONS,))
        row = self._db.one("SELECT * FROM decisions WHERE id = ?", (cursor.lastrowid,))
        assert row is not None
        return _decision(row)

    def finish(self, decision_id: int, outcome: str, result: Mapping[str, Any] | None = None) -> None:
        self._db.execute(
            "UPDATE decisions SET outcome = ?, result = ? WHERE id = ?",
            (outcome, json.dumps(dict(result or {}), ensure_ascii=False, default=str), decision_id),
        )

    def by_command(self, command_id: str) -> Decision | None:
        row = self._db.one("SELECT * FROM decisions WHERE command_id = ?", (command_id,))
        return None if row is None else _decision(row)

    def by_moment(self, session: str, moment: str, moment_id: str) -> list[Decision]:
        rows = self._db.all(
            "SELECT * FROM decisions WHERE session = ? AND moment = ? AND moment_id = ? ORDER BY id",
            (session, moment, moment_id),
        )
        return [_decision(row) for row in rows]

    def recent(self, *, agent: str | None = None, session: str | None = None, limit: int = 50) -> list[Decision]:
        """Newest first."""
        rows = self._db.all(
            "SELECT * FROM decisions WHERE (? IS NULL OR agent = ?) AND (? IS NULL OR session = ?) "
            "ORDER BY id DESC LIMIT ?",
            (agent, agent, session, session, limit),
        )
        return [_decision(row) for row in rows]

    def spent(self, agent: str, since: int) -> tuple[int, int]:
        """(commands, prefetched chunks) of an agent since then."""
        row = self._db.one(
            "SELECT COUNT(*) AS commands, COALESCE(SUM(CASE action WHEN 'prefetch' THEN chunks END), 0) AS chunks "
            "FROM decisions WHERE agent = ? AND at >= ? AND command_id IS NOT NULL",
            (agent, since),
        )
        assert row is not None
        return int(row["commands"]), int(row["chunks"])

    def retained(self, session: str) -> bool:
        """Whether something was retained for the session since its last release."""
        row = self._db.one(
            "SELECT action FROM decisions WHERE session = ? AND action IN ('retain', 'release') "
            "AND command_id IS NOT NULL ORDER BY id DESC LIMIT 1",
            (session,),
        )
        return row is not None and row["action"] == "retain"
