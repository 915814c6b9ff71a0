# SPDX-License-Identifier: Apache-2.0
"""The broker's clock as this process sees it, so that expiry does not depend on clocks being equal.

Stream timestamps are the broker's. `BrokerClock` keeps its offset to the local clock, from requests whose answer
carries the server's time: the offset is uncertain by half the round trip, so the quickest recent sample counts.
"""

from __future__ import annotations

import calendar
import time
from collections import deque

_SAMPLES = 8


def parse_rfc3339_ns(text: str) -> int:
    """`2026-01-02T03:04:05.123456789Z` as unix nanoseconds. Raises ValueError."""
    day, _, rest = text.partition("T")
    clock, _, fraction = rest.removesuffix("Z").partition(".")
    if not rest.endswith("Z") or (fraction and not fraction.isdigit()):
        raise ValueError(f"not a UTC time: {text!r:.60}")
    seconds = calendar.timegm(time.strptime(f"{day}T{clock}", "%Y-%m-%dT%H:%M:%S"))
    return seconds * 1_000_000_000 + int(fraction[:9].ljust(9, "0") or 0)


def to_rfc3339(time_ns: int) -> str:
    """Unix nanoseconds as the text JetStream takes."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


class BrokerClock:
    """Offset of the broker's clock to ours, in nanoseconds (positive: the broker is ahead)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        self.offset_ns = 0
        self.uncertain_ns = 0
        """How far off the offset may be, either way."""

    @property
    def measured(self) -> bool:
        return bool(self._samples)

    def sample(self, sent_ns: int, received_ns: int, broker_ns: int) -> None:
        """One request: when it was sent and answered by our clock, and the time the broker gave."""
        round_trip = max(0, received_ns - sent_ns)
        self._samples.append((round_trip, broker_ns - (sent_ns + round_trip // 2)))
        best = min(self._samples)
        self.uncertain_ns, self.offset_ns = best[0] // 2 + 1, best[1]

    def forget(self) -> None:
        """After a reconnect: it may be another server with another clock."""
        self._samples.clear()

    def now_ns(self) -> int:
        """The broker's time now."""
        return time.time_ns() + self.offset_ns

    def to_local_ns(self, broker_ns: int) -> int:
        """A broker timestamp on our clock."""
        return broker_ns - self.offset_ns
