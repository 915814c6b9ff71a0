# SPDX-License-Identifier: Apache-2.0
"""How well a search finds the topic that a sentence means: top-1 and mean reciprocal rank over labelled dialogues.

A set is ``{"topics": [{session, topic, hours_ago, notes: [[role, text]]}], "queries": [{query, session, topic, kind,
from?}]}``. Queries of kind ``offtopic`` have no right answer: they count as right when the search is *not* sure. Reads
``KeyError`` or ``ValueError`` out of a set that is not one. Each evaluation fills a store of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semkv.consumers.memory.embeddings import Embedding, LexicalEmbedding, LocalEmbedding
from semkv.consumers.memory.search import Finder
from semkv.consumers.memory.store import Store

__all__ = ["Score", "evaluate", "load"]

_AGENT = "evaluation"


@dataclass
class Score:
    """Counts over one kind of query, or all."""

    queries: int = 0
    first: int = 0
    reciprocal: float = 0.0
    misses: list[str] = field(default_factory=list)

    @property
    def top1(self) -> float:
        return self.first / self.queries if self.queries else 0.0

    @property
    def mrr(self) -> float:
        return self.reciprocal / self.queries if self.queries else 0.0

    def add(self, rank: int, query: str, answer: str) -> None:
        self.queries += 1
        self.first += rank == 1
        self.reciprocal += 1 / rank if rank else 0.0
        if rank != 1:
            self.misses.append(f"{query} -> {answer} (right one at {rank or 'none'})")


def load(path: Path | str) -> dict[str, Any]:
    """A set of dialogues; refuses a query whose right answer is not among the topics."""
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    known = {(topic["session"], topic["topic"]) for topic in data["topics"]}
    for query in data["queries"]:
        if query["kind"] != "offtopic" and (query["session"], query["topic"]) not in known:
            raise ValueError(f"query {query['query']!r}: no topic {query['topic']!r} in session {query['session']!r}")
    return data


async def evaluate(data: Mapping[str, Any], embedding: Embedding) -> dict[str, Score]:
    """Scores by kind; ``all`` those with a right answer, ``when sure`` those that would have led to a command.

    For ``offtopic`` top-1 is the share that the search was rightly unsure of.
    """
    store = Store()
    try:
        now = time.time_ns()
        for topic in sorted(data["topics"], key=lambda t: -t["hours_ago"]):
            at = now - int(topic["hours_ago"] * 3600e9)
            store.sessions.ensure(topic["session"], _AGENT)
            topic_id = store.sessions.ensure_topic(topic["session"], topic["topic"], at=at)
            texts = [topic["topic"], *(text for _, text in topic["notes"])]
            for text, vector in zip(texts, await embedding.embed(texts), strict=True):
                store.notes.add(topic_id, "note", text, embedding.name, vector, at)
        finder = Finder(store, embedding)
        scores: dict[str, Score] = {"all": Score()}
        for query in data["queries"]:
            found = await finder.find(query["query"], agent=_AGENT, session=query.get("from"), limit=10_000, now=now)
            best = f"{found.best.topic}" if found.best else "nothing"
            kind = scores.setdefault(query["kind"], Score())
            if query["kind"] == "offtopic":
                kind.add(0 if found.sure else 1, query["query"], best)
                continue
            places = [(c.session, c.topic) for c in found.candidates]
            wanted = (query["session"], query["topic"])
            rank = places.index(wanted) + 1 if wanted in places else 0
            for score in (kind, scores["all"]):
                score.add(rank, query["query"], best)
            if found.sure:
                scores.setdefault("when sure", Score()).add(rank, query["query"], best)
        return scores
    finally:
        store.close()


def table(scores: Mapping[str, Score]) -> str:
    """The scores for people."""
    lines = [f"{'kind':<12}{'queries':>8}{'top-1':>8}{'MRR':>8}"]
    lines += [f"{kind:<12}{s.queries:>8}{s.top1:>8.3f}{s.mrr:>8.3f}" for kind, s in scores.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """``python -m semkv.consumers.memory.evaluation SET.json [lexical|local]``"""
    values = sys.argv[1:] if arguments is None else arguments
    embedding: Embedding = LocalEmbedding() if values[1:2] == ["local"] else LexicalEmbedding()
    scores = asyncio.run(evaluate(load(values[0]), embedding))
    print(table(scores))
    for kind, score in scores.items():
        if kind not in {"all"}:
            for miss in score.misses:
                print(f"  {kind}: {miss}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
