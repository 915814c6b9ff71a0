# SPDX-License-Identifier: Apache-2.0
"""What a rank's prefetches turned out to be worth: told on the bus by rank 0, and linked from the hits' spans.

Rank 0 is the lowest storage rank of every engine: LMCache leaves the storage manager out only of ranks above it. The
others attribute too where spans are made, since each has a hit span of its own.

Threads: the engine's threads only count (see `Attribution`); a daemon thread settles what has gone and tells what is
due, twice a second. Errors: none reach the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from semkv.bus import messages
from semkv.bus.tracing import TraceContext
from semkv.consumers.rank import RankIdentity
from semkv.consumers.storage.attribution import Attribution, Outcome

_log = logging.getLogger("semkv.engine_hooks")

SWEEP_S = 0.5

Tell = Callable[[messages.Outcome, TraceContext | None], None]


class Spans(Protocol):
    """Whoever makes the spans of hits."""

    def link(self, request_id: str, find: Callable[[], TraceContext | None]) -> None:
        """The next span of this request is due to the command that `find` finds."""


class Worth:
    """Attributes one rank's hits. `attribution` is the storage's watch; `start` once the worker runs."""

    def __init__(self, who: RankIdentity, spans: Spans | None) -> None:
        self._who = who
        self._spans = spans
        self._tell: Tell | None = None
        self._find: Callable[[str], TraceContext | None] = lambda name: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semkv-worth", daemon=True)
        self.attribution = Attribution(self._due, on_useful=None if spans is None else self._useful)

    def start(self, tell: Tell, find: Callable[[str], TraceContext | None]) -> None:
        """`tell` publishes without blocking; `find` gives a command's place in its trace."""
        self._find = find
        if self._who.rank == 0:
            self._tell = tell
        self._thread.start()

    def close(self) -> None:
        """Tell what is due, and end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            stopping = self._stop.wait(SWEEP_S)
            try:
                self.attribution.sweep()
            except Exception:
                _log.exception("semkv: hits could not be attributed")
            if stopping:
                return

    def _useful(self, name: str, request_id: str) -> None:
        if self._spans is not None:
            # The command's own span is made when it ends, which may be after the hit.
            self._spans.link(request_id, lambda: self._find(name))

    def _due(self, outcome: Outcome) -> None:
        if self._tell is None:
            return
        # The name is the command's message id: its tenant's token and its own id, neither of which has a dot.
        tenant, _, command_id = outcome.command_id.partition(".")
        self._tell(
            messages.Outcome(
                tenant=tenant,
                domain=self._who.domain.fingerprint,
                instance=self._who.instance,
                command_id=command_id,
                rank=self._who.rank,
                useful=outcome.useful,
                redundant=outcome.redundant,
                late=outcome.late,
                wasted=outcome.wasted,
                bytes=outcome.bytes,
                lead_ms=outcome.lead_ms,
            ),
            self._find(outcome.command_id),
        )
