# SPDX-License-Identifier: Apache-2.0
"""What was said, by topic, with its vector: the text that "continue what we discussed" is looked up in.

The texts come from the agent and stay in its file; none of them goes on the bus. Texts are cut to ``MAX_TEXT``
characters, a topic keeps its newest ``MAX_NOTES``. Vectors carry the name of the embedding that made them: another
embedding makes them anew. Called from the map's loop, read from its search thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from semkv.consumers.memory.embeddings.base import Vector
from semkv.consumers.memory.store.database import Database

__all__ = ["MAX_NOTES", "MAX_TEXT", "Note", "Notes", "TopicNotes", "pack_vector", "unpack_vector"]

MAX_TEXT = 4000
MAX_NOTES = 200


@dataclass(frozen=True)
class Note:
    id: int
    role: str
    text: str
    vector: Vector


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
        return sparse
    return array("f", data[1:]).tolist()


class Notes:
    """Rows of ``notes``."""

    def __init__(self, database: Database) -> None:
        self._db = database

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

    def by_topic(self, agent: str | None = None) -> list[TopicNotes]:
        """Every open topic of the agent that has notes, the newest first."""
        topics = self._db.all(
            "SELECT t.*, s.agent FROM topics t JOIN sessions s ON s.session = t.session "
            "WHERE t.closed = 0 AND (? IS NULL OR s.agent = ?) ORDER BY t.updated_at DESC, t.id DESC",
            (agent, agent),
        )
        found = []
        for topic in topics:
            rows = self._db.all("SELECT * FROM notes WHERE topic_id = ? ORDER BY id", (topic["id"],))
            notes = tuple(Note(r["id"], r["role"], r["text"], unpack_vector(r["vector"])) for r in rows)
            found.append(
                TopicNotes(
                    topic["agent"], topic["session"], topic["topic"], topic["intent"], topic["updated_at"], notes
                )
            )
        return found
