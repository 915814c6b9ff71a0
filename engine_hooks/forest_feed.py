# SPDX-License-Identifier: Apache-2.0
"""Tells a rank's prefix forest which chains the engine is asked for, and which requests have ended.

Every storage rank gets each request's whole chain before it runs (`LMCacheEngine.async_lookup_and_prefetch`, or
`lookup` where loading is synchronous), so the forest depends on neither NATS nor the scheduler. The two methods are
wrapped on this engine object only; session and tenant come from the labels that the scheduler's lookup client added.

Threads: the wrapped calls run on LMCache's lookup server thread, `finished` on the forward thread; the forest locks.
Errors: none reach LMCache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from semkv.engine_hooks.lookup_client import CHUNKS_LABEL, SESSION_LABEL, TENANT_LABEL, TRACE_LABEL

_log = logging.getLogger("semkv.engine_hooks")
_MARK = "__semkv_forest__"


class Forest(Protocol):
    """The part of the prefix forest that is fed."""

    def record_lookup(
        self,
        tenant: str | None,
        session: str | None,
        hashes: Sequence[int],
        request_id: str,
        running: bool = True,
        *,
        tail: int | None = None,
    ) -> None: ...

    def finished(self, request_ids: Iterable[str]) -> None: ...


class Hits(Protocol):
    """Whoever attributes hits to prefetches."""

    def looked_up(self, request_id: str, hashes: Sequence[int]) -> None: ...

    def finished(self, request_ids: Iterable[str]) -> None: ...


class ForestFeed:
    """Feeds one forest from one engine. `follow` is told the trace of each request that has one, `hits` who asks."""

    def __init__(
        self,
        engine: Any,
        forest: Forest,
        chunk_size: int,
        follow: Callable[[str, str], None] | None = None,
        hits: Hits | None = None,
    ) -> None:
        self._forest = forest
        self._follow = follow
        self._hits = hits
        self._chunk_size = chunk_size
        self._said = False
        for name in ("async_lookup_and_prefetch", "lookup"):
            method = getattr(engine, name)
            if not hasattr(method, _MARK):
                setattr(engine, name, self._listening(method))

    def _listening(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def listening(*args: Any, **kwargs: Any) -> Any:
            # Both are called with keywords by LMCache; anything else is not a request's lookup.
            if not args and kwargs.get("lookup_id") and kwargs.get("hashes"):
                self.looked_up(kwargs["lookup_id"], kwargs["hashes"], kwargs)
            return method(*args, **kwargs)

        setattr(listening, _MARK, True)
        return listening

    def looked_up(self, lookup_id: str, hashes: Sequence[int], call: dict[str, Any]) -> None:
        """A request's chain: its whole chunks and its tail; of a request looked up again only its prompt's chunks."""
        try:
            labels = call.get("request_configs") or {}
            whole = list(hashes)
            offsets = call.get("offsets")
            tail = whole.pop() if offsets and offsets[-1] < self._chunk_size else None
            if CHUNKS_LABEL in labels:
                tail = None  # it ends with generated tokens
                whole = whole[: int(labels[CHUNKS_LABEL])]
            if self._follow is not None and TRACE_LABEL in labels:
                self._follow(lookup_id, labels[TRACE_LABEL])
            self._forest.record_lookup(labels.get(TENANT_LABEL), labels.get(SESSION_LABEL), whole, lookup_id, tail=tail)
            if self._hits is not None:
                self._hits.looked_up(lookup_id, whole if tail is None else [*whole, tail])
        except Exception:
            self._failed()

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended in the engine."""
        try:
            if request_ids:
                self._forest.finished(request_ids)
                if self._hits is not None:
                    self._hits.finished(request_ids)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        if not self._said:
            self._said = True
            _log.exception("semkv: the prefix forest could not be told of a request; evicts may take shared chunks")
