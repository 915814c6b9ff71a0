# SPDX-License-Identifier: Apache-2.0
"""Decisions and searches as spans: the one file of the memory map that knows tracing, and only the bus's tracer.

A decision's span is the parent of its command, so that one trace goes from the agent's moment to the bytes moved; a
search's span is the parent of the decision it led to. An agent's own span, where its program has one, is the parent of
both. Texts never enter a span. With a tracer that is off nothing is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from semkv.bus.tracing import NullTracer, TraceContext
from semkv.consumers.memory.search import Found
from semkv.consumers.memory.store import Decision

__all__ = ["DecisionSpans"]

# Tasks inherit it: a command that is carried out in the background still belongs to the moment that decided it.
_parent: ContextVar[TraceContext | None] = ContextVar("semkv_memory_parent", default=None)


class DecisionSpans:
    """Makes the spans of decisions and searches."""

    def __init__(self, tracer: NullTracer | None = None) -> None:
        self._tracer = tracer or NullTracer()

    def decided(self, decision: Decision) -> None:
        """A decision to do nothing."""
        with self.acting(decision):
            pass

    @contextmanager
    def acting(self, decision: Decision) -> Iterator[str | None]:
        """Around the publishing of a decision's command; yields the traceparent that the command carries on."""
        parent = _parent.get() or self._tracer.current()
        with self._tracer.span("memory.decide", parent=parent) as span:
            span.put(
                {
                    "kv.session_id": decision.session,
                    "kv.agent": decision.agent,
                    "kv.moment": decision.moment,
                    "kv.action": decision.action,
                    "kv.reason": decision.reason if decision.moment != "continued" else decision.action,
                    "kv.chunks.requested": decision.chunks,
                }
            )
            if decision.command_id:
                span.put({"kv.command_id": decision.command_id})
            yield span.context.traceparent if span.context is not None else None

    @contextmanager
    def searching(self, session: str) -> Iterator[Callable[[Found], None]]:
        """Around a search and what follows from it; what it yields takes the answer."""
        with self._tracer.span("memory.search", parent=self._tracer.current()) as span:

            def answered(found: Found) -> None:
                span.put({"memory.candidates": len(found.candidates), "memory.sure": found.sure})
                span.put({"memory.embedding": found.embedding})
                if found.best is not None:
                    span.put({"kv.session_id": found.best.session, "memory.score": found.best.score})

            token = _parent.set(span.context)
            try:
                yield answered
            finally:
                _parent.reset(token)
