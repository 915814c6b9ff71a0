# SPDX-License-Identifier: Apache-2.0
"""How near a query is to each topic: by shared terms (sparse vectors) or by angle (dense ones).

Sparse: the share of the query's information that the topic's notes hold, rare terms among the topics counting most
and repeats ever less (as BM25 does), so a score of 1 means "everything asked for is there". Dense: the best note's
cosine, leaned a little on the topic's mean. Pure; both return the terms or the note that decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from semkv.consumers.memory.embeddings.base import Vector
from semkv.consumers.memory.embeddings.lexical import readable
from semkv.consumers.memory.store.notes import TopicNotes

__all__ = ["Match", "fuse", "score"]

_SATURATION = 1.2
_LENGTH = 0.5
_MEAN = 0.25


@dataclass(frozen=True)
class Match:
    """One topic's nearness and what made it."""

    score: float
    terms: tuple[str, ...] = ()
    note: str = ""


def score(query: Vector, topics: Sequence[TopicNotes]) -> list[Match]:
    """One match per topic, in their order."""
    if isinstance(query, dict):
        return _sparse(query, topics)
    return [_dense(query, topic) for topic in topics]


def fuse(words: Match, angle: Match, floor: float) -> Match:
    """Words first, and what an angle above the floor adds to them: exact names must not lose to a vague likeness."""
    value = words.score + max(0.0, angle.score - floor / 2)
    return Match(value, words.terms, angle.note if angle.score >= floor else "")


def _sparse(query: dict[str, float], topics: Sequence[TopicNotes]) -> list[Match]:
    bags: list[dict[str, float]] = []
    for topic in topics:
        bag: dict[str, float] = {}
        for note in topic.notes:
            if isinstance(note.vector, dict):
                for term in query:
                    weight = note.vector.get(term)
                    if weight is not None:
                        bag[term] = bag.get(term, 0.0) + weight
        bags.append(bag)
    sizes = [sum(n.size for n in t.notes) for t in topics]
    mean_size = sum(sizes) / len(sizes) if sizes else 1.0
    total = len(topics)
    rarity = {}
    for term in query:
        holders = sum(1 for bag in bags if term in bag)
        rarity[term] = math.log(1.0 + (total - holders + 0.5) / (holders + 0.5))
    # A term that no topic has tells that the query is about something else, but only so much.
    asked = sum(weight * rarity[term] for term, weight in query.items())
    found = []
    for bag, size in zip(bags, sizes, strict=True):
        norm = _SATURATION * (1 - _LENGTH + _LENGTH * size / (mean_size or 1.0))
        gains = {t: query[t] * rarity[t] * tf * (_SATURATION + 1) / (tf + norm) for t, tf in bag.items()}
        best = sorted((t for t in gains if readable(t)), key=lambda t: -gains[t])[:5]
        value = min(1.0, sum(gains.values()) / asked) if asked > 0 else 0.0
        found.append(Match(value, tuple(best)))
    return found


def _dense(query: list[float], topic: TopicNotes) -> Match:
    best, text = 0.0, ""
    mean = [0.0] * len(query)
    count = 0
    for note in topic.notes:
        if isinstance(note.vector, dict) or len(note.vector) != len(query):
            continue
        near = _cosine(query, note.vector)
        count += 1
        for i, value in enumerate(note.vector):
            mean[i] += value
        if near > best:
            best, text = near, note.text
    if not count:
        return Match(0.0)
    return Match((1 - _MEAN) * best + _MEAN * max(0.0, _cosine(query, mean)), note=text[:80])


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    size = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return product / size if size else 0.0
