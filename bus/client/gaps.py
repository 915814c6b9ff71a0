# SPDX-License-Identifier: Apache-2.0
"""Finding lost events by their sequence numbers.

An engine process counts a tenant's events; the parts of one share its number; a heartbeat tells the newest number. A
number that is skipped is a gap at once, and so is one of which not every part came before the next. At the tail it is
a gap when the next heartbeat still finds it missing, since an event may be on its way while a heartbeat is sent. What
came before the first number seen of an instance is not judged. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_SOURCES_KEPT = 4096


@dataclass(frozen=True)
class Gap:
    """Events `first`..`last` of one engine process did not arrive: lost, or older than the stream keeps."""

    instance: str
    epoch: int
    first: int
    last: int


@dataclass
class _Source:
    epoch: int
    last: int
    part: int = 0
    missing_parts: int = 0
    """How many parts of the last event have not come."""
    tail: int = 0

    @property
    def first_missing(self) -> int:
        """The oldest number that is not there, or not whole."""
        return self.last if self.missing_parts > 0 else self.last + 1


class GapDetector:
    """One reader's view of all engine processes."""

    def __init__(self) -> None:
        self._sources: OrderedDict[str, _Source] = OrderedDict()

    def event(self, instance: str, epoch: int, seq: int, part: int, parts: int = 1) -> tuple[bool, Gap | None]:
        """(whether this part of an event is new, the gap before it)."""
        begun = instance not in self._sources  # perhaps in the middle of an event
        source = self._source(instance, epoch, seq - 1)
        if source is None or (seq, part) <= (source.last, source.part):
            return False, None
        gap = None
        if seq > source.last:
            if source.first_missing < seq:
                gap = Gap(instance, epoch, source.first_missing, seq - 1)
            source.last, source.missing_parts = seq, parts - part if begun else parts - 1
        else:
            source.missing_parts -= 1
        source.part = part
        return True, gap

    def heartbeat(self, instance: str, epoch: int, last_seq: int) -> Gap | None:
        """The gap that the heartbeat before this one already pointed at."""
        source = self._source(instance, epoch, last_seq)
        if source is None:
            return None
        gap = None
        if source.tail >= source.first_missing:
            gap = Gap(instance, epoch, source.first_missing, source.tail)
            source.last, source.part, source.missing_parts = source.tail, 1 << 30, 0
        source.tail = max(source.tail, last_seq)
        return gap

    def _source(self, instance: str, epoch: int, before: int) -> _Source | None:
        source = self._sources.get(instance)
        if source is not None and source.epoch > epoch:
            return None  # late words of a process that has been replaced
        if source is None:
            source = self._sources[instance] = _Source(epoch, before)
        elif source.epoch < epoch:
            source = self._sources[instance] = _Source(epoch, 0)
        self._sources.move_to_end(instance)
        if len(self._sources) > _SOURCES_KEPT:
            self._sources.popitem(last=False)
        return source
