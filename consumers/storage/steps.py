# SPDX-License-Identifier: Apache-2.0
"""Adds up what an operation spends on each tier, and turns it into `Step`s.

Times of many small reads are summed up in one step from the first start to the last end; where reads overlap, their
time counts once. One thread per instance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from semkv.bus.steps import Attribute, Step


class StepClock:
    """Collects the steps of one operation."""

    def __init__(self) -> None:
        self._spans: dict[str, list[int]] = {}
        self._chunks: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a piece of work that belongs to the step `name`."""
        start = time.time_ns()
        try:
            yield
        finally:
            self.add(name, start, time.time_ns())

    def add(self, name: str, start: int, end: int) -> None:
        """Add a piece of work that was timed elsewhere; in about the order of their starts."""
        known = self._spans.setdefault(name, [start, start, 0])
        known[2] += max(0, end - max(start, known[1]))
        known[1] = max(known[1], end)

    def count(self, name: str, chunks: int, size: int) -> None:
        """Add what the step moved."""
        self._chunks[name] = self._chunks.get(name, 0) + chunks
        self._bytes[name] = self._bytes.get(name, 0) + size

    def steps(self) -> tuple[Step, ...]:
        """The finished steps, in order of their start."""
        made = []
        for name, (start, end, busy) in self._spans.items():
            attributes: dict[str, Attribute] = {
                "kv.chunks.moved": self._chunks.get(name, 0),
                "kv.bytes": self._bytes.get(name, 0),
                "kv.busy_ns": busy,
            }
            made.append(Step(name, start, end, attributes))
        return tuple(sorted(made, key=lambda step: step.start_ns))
