# SPDX-License-Identifier: Apache-2.0
"""The memory map's embedded store: one SQLite file that outlives the agent's process.

``Store(path)`` holds ``sessions``, ``chains``, ``notes`` and ``decisions`` and the position in the event stream.
"""

from __future__ import annotations

from pathlib import Path

from semkv.consumers.memory.store.chains import Chains, Kept
from semkv.consumers.memory.store.database import Database, StoreError
from semkv.consumers.memory.store.decisions import Decision, Decisions
from semkv.consumers.memory.store.notes import Note, Notes, TopicNotes
from semkv.consumers.memory.store.sessions import Session, Sessions, Topic

__all__ = ["Decision", "Kept", "Note", "Session", "Store", "StoreError", "Topic", "TopicNotes"]


class Store:
    """The map's memory; ``:memory:`` for one that is not kept."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.database = Database(path)
        self.sessions = Sessions(self.database)
        self.chains = Chains(self.database)
        self.notes = Notes(self.database)
        self.decisions = Decisions(self.database)

    @property
    def path(self) -> str:
        return self.database.path

    def seen(self, instance: str, epoch: int, tenant: str) -> int | None:
        """The highest seq taken in from this process of this engine."""
        row = self.database.one(
            "SELECT last_seq FROM publishers WHERE instance = ? AND epoch = ? AND tenant = ?", (instance, epoch, tenant)
        )
        return None if row is None else int(row["last_seq"])

    def advance(self, instance: str, epoch: int, tenant: str, seq: int, lost: int) -> None:
        """Moves on to ``seq`` and counts what was lost before it."""
        self.database.execute(
            "INSERT INTO publishers VALUES (?, ?, ?, ?, ?) ON CONFLICT (instance, epoch, tenant) DO UPDATE SET "
            "last_seq = MAX(last_seq, excluded.last_seq), lost = lost + excluded.lost",
            (instance, epoch, tenant, seq, lost),
        )

    def lost(self) -> int:
        """Events that are known to have been lost, all engines together."""
        row = self.database.one("SELECT COALESCE(SUM(lost), 0) FROM publishers")
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        self.database.close()
