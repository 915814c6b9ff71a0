# SPDX-License-Identifier: Apache-2.0
"""``semkv why COMMAND``: a recorded decision in words. Pure but for the store it reads."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from semkv.consumers.memory.store import Decision, Store

__all__ = ["explain", "words"]


def explain(store: Store, command_id: str) -> str | None:
    """Why this command was given and what became of it; None for a command that is not of this map."""
    decision = store.decisions.by_command(command_id)
    return None if decision is None else words(decision)


def words(decision: Decision) -> str:
    """A decision, line by line."""
    at = datetime.fromtimestamp(decision.at / 1e9, tz=timezone.utc).isoformat(timespec="milliseconds")
    details: dict[str, Any] = dict(decision.details)
    lines = [
        f"{decision.action} {decision.command_id or '(no command)'}",
        f"  when      {at}, agent {decision.agent}, session {decision.session or '-'}",
        f"  moment    {decision.moment}" + (f" ({decision.moment_id})" if decision.moment_id else ""),
        f"  because   {decision.reason}",
    ]
    if "query" in details:
        lines.append(f"  asked     {details['query']}")
        lines.append(f"  search    {details.get('why', '')} [{details.get('embedding', '')}]")
        lines += [f"            {candidate}" for candidate in details.get("candidates", ())]
    if decision.chunks:
        chain = f"chain of request {details.get('request_id') or '?'}, topic {details.get('topic') or '-'}"
        lines.append(f"  chunks    {decision.chunks}: {chain}, domain {details.get('domain') or '?'}")
    limits = [f"{name}={details[name]}" for name in ("expires_in_ms", "delay_ms", "ttl_s", "tiers") if name in details]
    if limits:
        lines.append(f"  limits    {', '.join(limits)}")
    if decision.outcome:
        lines.append(f"  outcome   {decision.outcome}")
    for rank in decision.result.get("ranks", ()):
        counts = ", ".join(f"{count} {status}" for status, count in sorted(rank["counts"].items())) or "nothing"
        reason = f" ({rank['reason']})" if rank.get("reason") else ""
        lines.append(
            f"            {rank['instance']}.{rank['rank']}: {rank['state']}, {counts}{_moved(rank)}, "
            f"{rank['ran_ms']:.1f} ms{reason}"
        )
    for place, fates in decision.result.get("worth", {}).items():
        counted = ", ".join(f"{count} {fate}" for fate, count in fates.items() if fate != "lead_ms" and count)
        lines.append(f"  worth     {place}: {counted or 'not used yet'}, {fates['lead_ms']:g} ms ahead")
    if "trace_id" in decision.result:
        lines.append(f"  trace     {decision.result['trace_id']} (semkv trace FILE ID, or --jaeger URL ID)")
    lines += [
        f"            {name}: {decision.result[name]}"
        for name in ("error", "why", "unanswered")
        if name in decision.result
    ]
    return "\n".join(lines)


def _moved(rank: dict[str, Any]) -> str:
    # Decisions that an earlier version recorded have no bytes.
    return f", {rank['bytes'] / 1e6:.1f} MB" if rank.get("bytes") else ""
