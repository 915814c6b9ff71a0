# SPDX-License-Identifier: Apache-2.0
"""What a model rank's storage costs: plain numbers, so that naming them as defaults imports nothing else. Immutable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyModel:
    """What things cost. Milliseconds, bytes."""

    fixed_ms: float = 0.5
    chunk_ms: float = 5.0
    chunk_bytes: int = 32 << 20
    ddr_chunks: int = 256
