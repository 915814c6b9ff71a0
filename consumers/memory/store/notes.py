# SPDX-License-Identifier: Apache-2.0
"""What was said, by topic, with its vector: the text that "continue what we discussed" is looked up in.

The texts come from the agent and stay in its file; none of them goes on the bus. Texts are cut to ``MAX_TEXT``
characters, a topic keeps its newest ``MAX_NOTES``. Vectors carry the name of the embedding that made them: another
embedding makes them anew. Called from the map's loop, read from its search thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from semkv.consumers.memory.embeddings.base import Vector
from semkv.consumers.memory.store.database import Database

__all__ = ["MAX_KEPT", "MAX_NOTES", "MAX_TEXT", "Note", "Notes", "TopicNotes", "pack_vector", "unpack_vector"]

MAX_TEXT = 4000
MAX_NOTES = 200
MAX_KEPT = 20_000
_BATCH = 500


@dataclass(frozen=True)
class Note:
    id: int
    role: str
    text: str
    vector: Vector
    size: float = 0.0  # of a sparse vector: its weights' sum


@dataclass(frozen=True)
class TopicNotes:
    """One topic as the search sees it."""

    agent: str
    session: str
    topic: str
    intent: str
    updated_at: int
    notes: tuple[Note, ...] = field(default=())


def pack_vector(vector: Vector) -> bytes:
    if isinstance(vector, dict):
        packed: bytes = msgpack.packb(vector)
        return b"s" + packed
    return b"d" + array("f", vector).tobytes()


def unpack_vector(data: bytes) -> Vector:
    if data[:1] == b"s":
        sparse: dict[str, float] = msgpack.unpackb(data[1:])
        # The same terms come in many notes: kept once.
        return {sys.intern(term): weight for term, weight in sparse.items()}
    return array("f", data[1:]).tolist()


class Notes:
    """Rows of ``notes``."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._kept: dict[int, tuple[str, Note]] = {}

    def add(self, topic_id: int, role: str, text: str, embedding: str, vector: Vector, at: int) -> None:
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO notes (topic_id, role, text, embedding, vector, at) VALUES (?, ?, ?, ?, ?, ?)",
                (topic_id, role, text[:MAX_TEXT], embedding, pack_vector(vector), at),
            )
            self._db.execute(
                "DELETE FROM notes WHERE topic_id = ? AND id NOT IN "
                "(SELECT id FROM notes WHERE topic_id = ? ORDER BY id DESC LIMIT ?)",
                (topic_id, topic_id, MAX_NOTES),
            )

    def stale(self, embedding: str, limit: int = 64) -> list[tuple[int, str]]:
        """Notes (id, text) that another embedding made."""
        rows = self._db.all("SELECT id, text FROM notes WHERE embedding != ? LIMIT ?", (embedding, limit))
        return [(row["id"], row["text"]) for row in rows]

    def renew(self, embedding: str, vectors: Sequence[tuple[int, Vector]]) -> None:
        with self._db.transaction():
            for note_id, vector in vectors:
                self._db.execute(
                    "UPDATE notes SET embedding = ?, vector = ? WHERE id = ?", (embedding, pack_vector(vector), note_id)
                )

    def by_topic(self, agent: str | None = None, *, vectors: bool = True) -> list[TopicNotes]:
        """Every open topic of the agent that has notes, the newest first; without ``vectors`` the notes are left out.

        Any thread. Decoded notes are kept, up to ``MAX_KEPT``, so that a second search costs a fraction of the first.
        """
        where = (
            "FROM topics t JOIN sessions s ON s.session = t.session WHERE t.closed = 0 AND (? IS NULL OR s.agent = ?)"
        )
        topics = self._db.all(
            f"SELECT t.*, s.agent {where} AND EXISTS (SELECT 1 FROM notes n WHERE n.topic_id = t.id) "
            "ORDER BY t.updated_at DESC, t.id DESC",
            (agent, agent),
        )
        notes: dict[int, list[Note]] = {}
        if vectors:
            wanted = self._db.all(
                f"SELECT id, topic_id, embedding FROM notes WHERE topic_id IN (SELECT t.id {where}) ORDER BY id",
                (agent, agent),
            )
            self._decode([row["id"] for row in wanted if self._kept.get(row["id"], ("",))[0] != row["embedding"]])
            for row in wanted:
                kept = self._kept.get(row["id"])
                if kept is not None:
                    notes.setdefault(row["topic_id"], []).append(kept[1])
        return [
            TopicNotes(
                t["agent"], t["session"], t["topic"], t["intent"], t["updated_at"], tuple(notes.get(t["id"], ()))
            )
            for t in topics
        ]

    def _decode(self, ids: Sequence[int]) -> None:
        if len(self._kept) + len(ids) > MAX_KEPT:
            self._kept = {}
        for start in range(0, len(ids), _BATCH):
            some = ids[start : start + _BATCH]
            marks = ", ".join("?" * len(some))
            for row in self._db.all(f"SELECT * FROM notes WHERE id IN ({marks})", some):
                vector = unpack_vector(row["vector"])
                size = sum(vector.values()) if isinstance(vector, dict) else 0.0
                self._kept[row["id"]] = row["embedding"], Note(row["id"], row["role"], row["text"], vector, size)
