# SPDX-License-Identifier: Apache-2.0
"""What an operation did and when, recorded where it happens and turned into spans elsewhere.

Storage operations return `Step`s and never touch OpenTelemetry: times are taken on the thread that works, spans are
built later on the worker's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Attribute = str | int | float | bool


@dataclass(frozen=True)
class Step:
    """One finished step: its span name, wall-clock start and end in unix nanoseconds, and its attributes."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
