# SPDX-License-Identifier: Apache-2.0
"""A rank's metrics: what became of its commands, and what the rank holds.

`result` belongs to the worker's loop and only adds to plain counters, but for the two times; the sources are read on
the export thread and copy what is kept. Where metrics are off, nothing of this does anything. Errors: none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from semkv.bus import metrics
from semkv.bus.messages import Command, Result, TierUsage
from semkv.bus.metrics import Labels, NullMetrics

DRY_RUN = "dry_run"


class Counted:
    """Counts on one rank."""

    def __init__(self, meter: NullMetrics) -> None:
        self._meter = meter
        self._commands: Counter[tuple[str, str]] = Counter()
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._moved: Counter[tuple[str, str]] = Counter()

    def result(self, command: Command, result: Result) -> None:
        """A command has ended here. A dry run is an operation of its own, since it moves nothing."""
        meter = self._meter
        if not meter.enabled:
            return
        dry = bool(getattr(command, "dry_run", False))
        op = DRY_RUN if dry else str(result.op)
        self._commands[op, str(result.state)] += 1
        for status, count in result.counts.items():
            self._chunks[op, str(status)] += count
        for tier, size in {} if dry else result.bytes_by_tier.items():
            self._moved[op, str(tier)] += size
        meter.record(metrics.QUEUE, result.queued_ms / 1e3, {"op": op})
        meter.record(metrics.RUN, result.ran_ms / 1e3, {"op": op})

    def watch(
        self,
        *,
        waiting: Callable[[], int],
        unreadable: Callable[[], Mapping[str, int]],
        worth: Callable[[], Mapping[str, int]],
        forest: Callable[[], Mapping[str, int]],
        tiers: Callable[[], tuple[TierUsage, ...]],
    ) -> None:
        """What is known anyway, read when it is exported."""

        def by(label: str, source: Callable[[], Mapping[str, int]]) -> metrics.Source:
            return lambda: [(value, {label: name}) for name, value in dict(source()).items()]

        def of_ops(label: str, kept: Counter[tuple[str, str]]) -> metrics.Source:
            return lambda: [(value, {"op": op, label: name}) for (op, name), value in dict(kept).items()]

        def of_tiers(field: str) -> metrics.Source:
            def source() -> Iterable[tuple[float, Labels]]:
                return [(getattr(tier, field), {"tier": tier.name}) for tier in tiers()]

            return source

        meter = self._meter
        meter.watch(metrics.COMMANDS, of_ops("state", self._commands))
        meter.watch(metrics.CHUNKS, of_ops("status", self._chunks))
        meter.watch(metrics.MOVED, of_ops("tier", self._moved))
        meter.watch(metrics.WAITING, lambda: [(waiting(), {})])
        meter.watch(metrics.UNREADABLE, by("kind", unreadable))
        meter.watch(metrics.PREFETCHED, by("fate", worth))
        meter.watch(metrics.FOREST, by("kind", forest))
        meter.watch(metrics.TIER_USED, of_tiers("used_bytes"))
        meter.watch(metrics.TIER_CAPACITY, of_tiers("capacity_bytes"))
        meter.watch(metrics.TIER_CHUNKS, of_tiers("chunks"))
