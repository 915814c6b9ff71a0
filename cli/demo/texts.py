# SPDX-License-Identifier: Apache-2.0
"""The conversation of the demo: two topics, each with material long enough that prefill takes seconds.

Texts are put together from sentences by a seeded generator, the same on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Message = dict[str, str]

SYSTEM: Message = {
    "role": "system",
    "content": "You are the assistant of a small platform team. Answer from the notes that the user gives you.",
}

_SUBJECTS = {
    "billing": ("the invoice job", "the tax table", "the retry queue", "the ledger", "the payment gateway", "a refund"),
    "garden": ("the rain sensor", "the greenhouse", "the compost log", "the seed plan", "the pump", "a tomato bed"),
}
_DOES = (
    "reads",
    "waits for",
    "writes to",
    "ignores",
    "sometimes blocks",
    "is older than",
    "was moved before",
    "copies",
)
_WHEN = ("at night", "after a restart", "on the first of a month", "when two requests meet", "since the last change")


@dataclass(frozen=True)
class Topic:
    """A topic: its name, the notes of each turn, and the question that continues it later."""

    name: str
    turns: tuple[str, ...]
    resume: str


def topic(name: str, *, turns: int, sentences: int) -> Topic:
    """A topic with `turns` turns of `sentences` sentences each."""
    generator = random.Random(f"semkv {name}")

    def notes() -> str:
        subjects = _SUBJECTS[name]
        return " ".join(
            f"{generator.choice(subjects)} {generator.choice(_DOES)} {generator.choice(subjects)} "
            f"{generator.choice(_WHEN)}, note {generator.randrange(1000)}."
            for _ in range(sentences)
        )

    asked = tuple(f"Notes about {name}, part {number + 1}: {notes()} What follows?" for number in range(turns))
    return Topic(name, asked, f"Let's go on with the {name} topic: what was the last note about?")
