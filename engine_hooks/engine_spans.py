# SPDX-License-Identifier: Apache-2.0
"""Spans of what a rank's engine does for a request: `kv.retrieve` and `kv.store`.

Made only where spans go somewhere; otherwise nothing is wrapped and nothing costs. On the forward thread two clock
readings and an append to a bounded queue; a daemon thread builds the spans. The request's trace reaches the rank as a
label of its lookup; a retrieve that a prefetch made possible links to that prefetch.

Threads: `retrieve`, `store` and `link` on the forward thread, `follow` on LMCache's lookup thread, spans on their own.
Errors: none reach LMCache; the queue drops its oldest.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from semkv.bus.steps import Attribute
from semkv.bus.tracing import NullTracer, TraceContext, setup_tracing, wanted

_log = logging.getLogger("semkv.engine_hooks")

FOLLOWED = 4096
QUEUED = 8192
DRAIN_S = 0.25
RETRIEVE = "kv.retrieve"

Find = Callable[[], TraceContext | None]


class _Done(NamedTuple):
    name: str
    request_id: str
    tokens: int
    start_ns: int
    end_ns: int


class EngineSpans:
    """Records one engine's retrieves and stores."""

    def __init__(self, engine: Any, tracer: NullTracer, about: Mapping[str, Attribute]) -> None:
        self._tracer = tracer
        self._about = dict(about)
        self._done: deque[_Done] = deque(maxlen=QUEUED)
        self._traces: OrderedDict[str, str] = OrderedDict()
        self._links: OrderedDict[str, list[Find]] = OrderedDict()
        self._stop = threading.Event()
        for name in ("retrieve", "store"):
            setattr(engine, name, self._timed(f"kv.{name}", getattr(engine, name)))
        self._thread = threading.Thread(target=self._run, name="semkv-spans", daemon=True)
        self._thread.start()

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            begin = time.time_ns()
            try:
                return method(tokens, *args, **kwargs)
            finally:
                count = 0 if tokens is None else len(tokens)
                self._done.append(_Done(name, str(kwargs.get("req_id", "")), count, begin, time.time_ns()))

        return timed

    def follow(self, request_id: str, traceparent: str) -> None:
        """This request's spans belong to this trace."""
        self._traces[request_id] = traceparent
        if len(self._traces) > FOLLOWED:
            self._traces.popitem(last=False)

    def link(self, request_id: str, find: Find) -> None:
        """This request is just being served by what a command brought in; `find` is asked when the span is built."""
        self._links.setdefault(request_id, []).append(find)
        if len(self._links) > FOLLOWED:
            self._links.popitem(last=False)

    def close(self) -> None:
        """Hand over what is left."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.wait(DRAIN_S):
            self._drain()
        self._drain()
        try:
            self._tracer.shutdown()
        except Exception:
            _log.debug("semkv: the spans' exporter did not end in order", exc_info=True)

    def _drain(self) -> None:
        while self._done:
            try:
                self._record(self._done.popleft())
            except Exception:
                _log.debug("semkv: a span was not recorded", exc_info=True)

    def _record(self, done: _Done) -> None:
        traceparent = self._traces.get(done.request_id)
        found = [find() for find in self._links.pop(done.request_id, ())] if done.name == RETRIEVE else []
        self._tracer.record(
            done.name,
            done.start_ns,
            done.end_ns,
            parent=None if traceparent is None else TraceContext(traceparent),
            links=[context for context in found if context is not None],
            attributes={**self._about, "kv.request_id": done.request_id[:256], "kv.tokens": done.tokens},
        )


def engine_spans(engine: Any, about: Mapping[str, Attribute]) -> EngineSpans | None:
    """The recorder of an engine's spans, if spans go anywhere."""
    return EngineSpans(engine, setup_tracing("semkv-engine"), about) if wanted() else None
