# SPDX-License-Identifier: Apache-2.0
"""From what the ranks said to an HTTP status and a body.

200 when every expected rank accepted (or, where results are waited for, answered and none failed); 207 when only some
did, with each rank's part; 504 when none did in time; 502 when all answered and all failed or refused. ``num_evicted``
counts requested chunks that were removed somewhere and have no copy left, in the tiers named, on any rank that
answered: a chunk counts once however many tiers and ranks held it, and one that was never there does not count. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv.bus.messages import Result
from semkv.bus.status import State

__all__ = ["Rank", "Report", "chunk_tiers", "num_evicted", "reply"]

Rank = tuple[str, int, str]
"""Instance, rank and hash domain."""

_GONE = {"removed", "absent"}
_BAD = {State.FAILED, State.REJECTED}


@dataclass
class Report:
    """What is known of a command, possibly asked of several domains."""

    op: str
    command_ids: tuple[str, ...]
    expected: tuple[Rank, ...]
    accepted: set[tuple[str, int]] = field(default_factory=set)
    results: dict[tuple[str, int], Result] = field(default_factory=dict)

    def ranks(self) -> list[Rank]:
        """The expected ranks, and any other that answered."""
        known = {(instance, rank) for instance, rank, _ in self.expected}
        more = [(r.instance, r.rank, r.domain) for place, r in self.results.items() if place not in known]
        return sorted({*self.expected, *more})

    def parts(self) -> list[dict[str, Any]]:
        """One entry per rank."""
        return [self._part(instance, rank, domain) for instance, rank, domain in self.ranks()]

    def _part(self, instance: str, rank: int, domain: str) -> dict[str, Any]:
        result = self.results.get((instance, rank))
        part: dict[str, Any] = {
            "instance": instance,
            "rank": rank,
            "domain": domain,
            "accepted": result is not None or (instance, rank) in self.accepted,
            "answered": result is not None,
        }
        if result is not None:
            part |= {
                "state": str(result.state),
                "counts": dict(result.counts),
                "bytes_by_tier": dict(result.bytes_by_tier),
                "usable_prefix": result.usable_prefix,
                "queued_ms": result.queued_ms,
                "ran_ms": result.ran_ms,
            }
            part |= {name: value for name in ("reason", "trace_id") if (value := getattr(result, name))}
        return part


def reply(report: Report, *, waited: bool, started: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body). ``waited``: results were waited for, not only acceptance."""
    ranks = report.ranks()
    done = set(report.results) if waited else report.accepted | set(report.results)
    silent = [f"{instance}.{rank}" for instance, rank, _ in ranks if (instance, rank) not in done]
    bad = [place for place, result in report.results.items() if result.state in _BAD]
    status = 200
    if len(silent) == len(ranks):
        status = 504
    elif len(bad) == len(ranks):
        status = 502
    elif silent or bad:
        status = 207
    words = {200: started or "success", 207: "partial", 502: "failed", 504: "unanswered"}
    body: dict[str, Any] = {"status": words[status], **more, "op": report.op, "command_id": report.command_ids[0]}
    if len(report.command_ids) > 1:
        body["command_ids"] = list(report.command_ids)
    body["ranks"] = report.parts()
    body["unanswered"] = silent
    if status in {502, 504}:
        body["error"] = _why(report, silent)
    return status, body


def _why(report: Report, silent: Sequence[str]) -> str:
    if len(silent) == len(report.ranks()):
        return f"no rank answered in time ({', '.join(silent)}); the command may still run: ask with its command_id"
    return "; ".join(f"{i}.{r}: {result.reason or result.state}" for (i, r), result in sorted(report.results.items()))


def num_evicted(report: Report) -> int:
    """See above; ranks that did not answer, refused or failed before trying say nothing about a chunk."""
    rows = [result.chunk_status for result in report.results.values() if result.chunk_status]
    return sum(
        1
        for statuses in zip(*rows, strict=False)
        if "removed" in statuses and all(str(status) in _GONE for status in statuses)
    )


def chunk_tiers(report: Report, chunks: int) -> list[list[str]]:
    """For a locate: the tiers that hold each chunk on any rank that answered, the fastest first."""
    order = {name: place for place, name in enumerate(("device", "cpu", "disk", "remote"))}
    found: list[set[str]] = [set() for _ in range(chunks)]
    for result in report.results.values():
        for place, tiers in enumerate((result.chunk_tiers or ())[:chunks]):
            found[place].update(str(tier) for tier in tiers)
    return [sorted(tiers, key=lambda tier: order.get(tier, 9)) for tiers in found]
