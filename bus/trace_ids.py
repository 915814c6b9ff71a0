# SPDX-License-Identifier: Apache-2.0
"""Trace and span ids that differ between processes, whatever a process does to Python's global random numbers.

vLLM seeds those with the same number in every process, at every start: ids drawn from them, as OpenTelemetry does by
default, would be the same in each rank and after each restart, and unlike spans would pass for one. Any thread.
"""

from __future__ import annotations

import random

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):
    """Ids from the operating system's random numbers; zero is no id."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def generate_span_id(self) -> int:
        return self._random.randrange(1, 1 << 64)

    def generate_trace_id(self) -> int:
        return self._random.randrange(1, 1 << 128)
