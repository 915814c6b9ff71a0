# SPDX-License-Identifier: Apache-2.0
"""A command's outcome in the few figures that a decision keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True)
class Summary:
    """State of the whole, what was loaded on the rank that loaded most, and how long the slowest rank took."""

    state: str
    loaded: int = 0
    ran_ms: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


def summarise(outcome: Any) -> Summary:
    """Figures of the client's outcome: ``state`` and one result per rank that answered."""
    results = list(outcome.results)
    ranks = [
        {"instance": r.instance, "rank": r.rank, "state": str(r.state), "counts": dict(r.counts), "ran_ms": r.ran_ms,
         "bytes": sum(r.bytes_by_tier.values()), **({"reason": r.reason} if r.reason else {})}
        for r in results
    ]  # fmt: skip
    unanswered = [str(rank) for rank in getattr(outcome, "unanswered", ())]
    details: dict[str, Any] = {"ranks": ranks}
    if trace := next((r.trace_id for r in results if r.trace_id), None):
        details["trace_id"] = trace
    if unanswered:
        details["unanswered"] = unanswered
    return Summary(
        state=str(outcome.state),
        loaded=max((int(r.counts.get("loaded", 0)) for r in results), default=0),
        ran_ms=max((float(r.ran_ms) for r in results), default=0.0),
        details=details,
    )
