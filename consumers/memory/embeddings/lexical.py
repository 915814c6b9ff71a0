# SPDX-License-Identifier: Apache-2.0
"""The built-in embedding: words and word parts of English, character pairs of Chinese; no model, no network.

Chinese needs no word list: pairs of neighbouring characters find "账单" in "账单页面" whatever a segmenter would say,
single characters help a little. English words lose their commonest endings, identifiers are split at case, digits
and underscores, and the three-letter parts of longer words forgive a typo. The weights say only how much a term tells
within its text; how rare it is among the topics is known to the search alone. Deterministic, thread-safe.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from semkv.consumers.memory.embeddings.base import Vector

__all__ = ["LexicalEmbedding", "readable", "terms"]

_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUNS = re.compile(rf"[{_CJK}]+|[^\W_{_CJK}]+", re.UNICODE)
_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[^\W\d_a-zA-Z]+")

_ENGLISH_FRAME = (
    "a about above after again all also am an and any are as at be because been before being but by can could did do "
    "does doing done down each few for from further get go going got had has have having he her here hers him his how "
    "i if in into is it its just let lets like ll make me more most my need no nor not now of off on once one only or "
    "other our out over own please re s same she should so some such t than that the their them then there these they "
    "thing things this those through to too under until up us ve very want was we were what when where which while who "
    "why will with would you your yes ok okay"
)
_CHINESE_FRAME = (
    "的了我你他她它们是在有和就都而及与着或一个没也很不要会能把被让给对从到这那哪吧呢吗啊呀嘛啦哦嗯么什怎请再还可以想"
)
_CHINESE_FRAME_PAIRS = (
    "我们 你们 他们 咱们 一下 一个 这个 那个 什么 怎么 可以 可能 没有 就是 还是 然后 但是 因为 所以 如果 现在 需要 应该"
)
_STOP_WORDS = frozenset(_ENGLISH_FRAME.split())
_STOP_CHARS = frozenset(_CHINESE_FRAME)
_STOP_PAIRS = frozenset(_CHINESE_FRAME_PAIRS.split())
_ENDINGS = ("ations", "ation", "ings", "ing", "ers", "ies", "ed", "es", "er", "ly", "s")

_PART = 0.15
_SINGLE = 0.25


@lru_cache(maxsize=16384)
def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            if ending == "ies":
                return stem + "y"
            # "running" and "runs" both to "run".
            if ending in {"ing", "ed", "er"} and len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "ls":
                stem = stem[:-1]
            return stem.rstrip("e") if len(stem) > 3 else stem
    return word.rstrip("e") if len(word) > 3 else word


def _latin(run: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    pieces = _CAMEL.findall(run) or [run]
    for piece in [run, *pieces] if len(pieces) > 1 else pieces:
        word = piece.lower()
        if word in _STOP_WORDS or (len(word) < 2 and not word.isdigit()):
            continue
        found.append((_stem(word), 1.0))
        if len(word) >= 5:
            found.extend((f"~{word[i : i + 3]}", _PART) for i in range(len(word) - 2))
    return found


def _chinese(run: str) -> list[tuple[str, float]]:
    found = [(char, _SINGLE) for char in run if char not in _STOP_CHARS]
    for i in range(len(run) - 1):
        pair = run[i : i + 2]
        if pair in _STOP_PAIRS or (pair[0] in _STOP_CHARS and pair[1] in _STOP_CHARS):
            continue
        # A pair with a grammatical character is a word boundary more often than a word.
        found.append((pair, 0.4 if pair[0] in _STOP_CHARS or pair[1] in _STOP_CHARS else 1.0))
    return found


def terms(text: str) -> dict[str, float]:
    """Every term of the text with its weight, repeats added up."""
    weights: dict[str, float] = {}
    for run in _RUNS.findall(unicodedata.normalize("NFKC", text)):
        pairs = _chinese(run) if "\u3400" <= run[0] <= "\u9fff" or "\uf900" <= run[0] <= "\ufaff" else _latin(run)
        for term, weight in pairs:
            weights[term] = weights.get(term, 0.0) + weight
    return weights


def readable(term: str) -> bool:
    """Whether the term means something to a person: a word or a pair of characters, not a part of one."""
    return not term.startswith("~") and len(term) > 1


class LexicalEmbedding:
    """Sparse vectors of terms."""

    name = "lexical-1"
    floor = 0.18

    def reads(self, text: str) -> bool:
        return True

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        return [terms(text) for text in texts]
