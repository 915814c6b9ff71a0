# SPDX-License-Identifier: Apache-2.0
"""Finds the topic that a sentence means, and says why it chose that one.

The subject is looked up in the notes of the agent's open topics; recency breaks near ties and decides alone where the
sentence has no subject ("继续讨论刚才的话题"). "Last time" leaves the session that asks out, "yesterday" prefers topics
of that age. A best match below the embedding's floor, or a sentence that neither names a subject nor asks to go on, is
answered with candidates and ``sure=False``: whoever warms caches on it would be guessing. An embedding other than the
built-in one adds to what the words say; notes that another one made are given new vectors first, and when it cannot be
had, or does not read the query's language, the words alone decide (and the answer says so).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from semkv.consumers.memory.embeddings.base import Embedding, EmbeddingError, Vector
from semkv.consumers.memory.embeddings.lexical import LexicalEmbedding, terms
from semkv.consumers.memory.search.cues import Cues, read
from semkv.consumers.memory.search.scoring import Match, fuse, score
from semkv.consumers.memory.store import Note, Store, TopicNotes

__all__ = ["Candidate", "Finder", "Found"]

_RECENCY = 0.04
_IN_TIME = 0.15
_SAME_SESSION = 0.02


@dataclass(frozen=True)
class Candidate:
    """A topic that was considered."""

    session: str
    topic: str
    score: float
    why: str


@dataclass(frozen=True)
class Found:
    """The answer: candidates, best first, and how sure the choice is."""

    query: str
    subject: str
    candidates: tuple[Candidate, ...]
    sure: bool
    embedding: str
    why: str

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


class Finder:
    """Search over a store with an embedding."""

    def __init__(self, store: Store, embedding: Embedding | None = None) -> None:
        self._store = store
        self.embedding: Embedding = embedding or LexicalEmbedding()
        self._words = LexicalEmbedding()

    async def vector(self, text: str) -> tuple[str, Vector]:
        """(embedding's name, vector) of a new note.

        Always the built-in one's: no agent's turn waits for a model. The next search that wants another makes it.
        """
        return self._words.name, (await self._words.embed([text]))[0]

    async def find(self, query: str, *, agent: str | None = None, session: str | None = None, limit: int = 5,
                   now: int | None = None) -> Found:  # fmt: skip
        """The topics that the query may mean, best first."""
        cues = read(query)
        name, trouble, angle = self._words.name, "", None
        named = bool(terms(cues.subject))
        if named and self.embedding.name != self._words.name and self.embedding.reads(cues.subject):
            try:
                await self._renew()
                angle = (await self.embedding.embed([cues.subject]))[0]
                name = self.embedding.name
            except EmbeddingError as error:
                trouble = f"; by words alone because {error}"
        topics = await asyncio.to_thread(self._store.notes.by_topic, agent, vectors=named)
        if cues.elsewhere and any(t.session != session for t in topics):
            topics = [t for t in topics if t.session != session]
        if not topics:
            return Found(query, cues.subject, (), False, name, "no topic has been noted yet" + trouble)
        now = now or time.time_ns()
        if not named:
            return self._newest(query, cues, topics, session, limit, now)
        matches, believed = await asyncio.to_thread(self._match, cues.subject, topics, angle)
        ranked = self._rank(cues, topics, matches, session, now)
        best = ranked[0]
        sure = believed[best[1]]
        why = f"{best[2].why}; {len(topics)} topics considered"
        if not sure:
            why = f"unsure, nothing scores as high as a match must; {why}"
        return Found(query, cues.subject, tuple(c for _, _, c in ranked[:limit]), sure, name, why + trouble)

    def _match(
        self, subject: str, topics: Sequence[TopicNotes], angle: Vector | None
    ) -> tuple[list[Match], list[bool]]:
        matches = score(terms(subject), [_worded(topic) for topic in topics])
        believed = [match.score >= self._words.floor for match in matches]
        if angle is None:
            return matches, believed
        floor = self.embedding.floor
        angles = score(angle, topics)
        return (
            [fuse(match, other, floor) for match, other in zip(matches, angles, strict=True)],
            [sure or other.score >= floor for sure, other in zip(believed, angles, strict=True)],
        )

    async def _renew(self) -> None:
        while stale := self._store.notes.stale(self.embedding.name):
            vectors = await self.embedding.embed([text for _, text in stale])
            self._store.notes.renew(
                self.embedding.name, [(note_id, vector) for (note_id, _), vector in zip(stale, vectors, strict=True)]
            )

    def _rank(self, cues: Cues, topics: Sequence[TopicNotes], matches: Sequence[Match], session: str | None,
              now: int) -> list[tuple[float, int, Candidate]]:  # fmt: skip
        ranked = []
        for index, (topic, match) in enumerate(zip(topics, matches, strict=True)):
            value = match.score + _RECENCY / (1 + index)  # topics come newest first
            reasons = [_reason(match)]
            if topic.session == session:
                value += _SAME_SESSION
                reasons.append("same session")
            if cues.age_s is not None:
                age = (now - topic.updated_at) / 1e9
                if cues.age_s[0] <= age <= cues.age_s[1]:
                    value += _IN_TIME
                    reasons.append("of that time")
            ranked.append((value, index, Candidate(topic.session, topic.topic, round(value, 4), ", ".join(reasons))))
        ranked.sort(key=lambda item: (-item[0], item[1]))
        return ranked

    def _newest(self, query: str, cues: Cues, topics: Sequence[TopicNotes], session: str | None, limit: int,
                now: int) -> Found:  # fmt: skip
        asked = cues.go_on or cues.just_now or cues.elsewhere or cues.age_s is not None
        here = [t for t in topics if t.session == session] if not cues.elsewhere else []
        ordered = here + [t for t in topics if t not in here]
        if cues.age_s is not None:
            low, high = cues.age_s
            ordered.sort(key=lambda t: not low <= (now - t.updated_at) / 1e9 <= high)
        phrases = ", ".join(repr(p) for p in cues.phrases) or "nothing"
        why = (
            f"no subject named, {phrases} asks for the newest topic"
            if asked
            else "neither a subject nor a wish to go on"
        )
        candidates = tuple(
            Candidate(t.session, t.topic, round(1 / (1 + i), 4), f"number {i + 1} by recency")
            for i, t in enumerate(ordered[:limit])
        )
        return Found(query, cues.subject, candidates, asked, self._words.name, why)


@lru_cache(maxsize=8192)
def _note_terms(text: str) -> dict[str, float]:
    return terms(text)


def _as_words(note: Note) -> Note:
    vector = _note_terms(note.text)
    return replace(note, vector=vector, size=sum(vector.values()))


def _worded(topic: TopicNotes) -> TopicNotes:
    """The topic with lexical vectors, made from the texts where another embedding made the kept ones."""
    return replace(
        topic,
        notes=tuple(n if isinstance(n.vector, dict) else _as_words(n) for n in topic.notes),
    )


def _reason(match: Match) -> str:
    if match.terms and match.note:
        return f"shares {', '.join(match.terms)} and is near to “{match.note}” ({match.score:.2f})"
    if match.terms:
        return f"shares {', '.join(match.terms)} ({match.score:.2f})"
    if match.note:
        return f"near to “{match.note}” ({match.score:.2f})"
    return f"shares nothing ({match.score:.2f})"
