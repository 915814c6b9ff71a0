# SPDX-License-Identifier: Apache-2.0
"""How much one agent may ask for: commands and prefetched chunks per minute, commands under way, bytes per command.

Counts come from the recorded decisions, so that a restart does not refill a budget. ``release`` is always allowed: it
gives back. Called from the map's loop.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from semkv.consumers.memory.policy.actions import Action
from semkv.consumers.memory.store import Store

__all__ = ["Budget", "Budgets"]

_MINUTE_NS = 60_000_000_000


@dataclass(frozen=True)
class Budget:
    """One agent's limits; 0 means none of it."""

    commands_per_minute: int = 600
    prefetched_chunks_per_minute: int = 200_000
    under_way: int = 64
    bytes_per_prefetch: int | None = None

    def __post_init__(self) -> None:
        for name in ("commands_per_minute", "prefetched_chunks_per_minute", "under_way"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative; 0 means none")


class Budgets:
    """Limits per agent."""

    def __init__(self, store: Store, default: Budget | None = None, agents: dict[str, Budget] | None = None) -> None:
        self._store = store
        self._default = default or Budget()
        self._agents = dict(agents or {})
        self.under_way: Counter[str] = Counter()

    def of(self, agent: str) -> Budget:
        return self._agents.get(agent, self._default)

    def refusal(self, agent: str, action: Action) -> str | None:
        """Why the action is over the agent's budget, or None."""
        if action.kind == "release":
            return None
        budget = self.of(agent)
        if self.under_way[agent] >= budget.under_way:
            return (
                f"over budget: {self.under_way[agent]} commands of {agent!r} are under way, {budget.under_way} allowed"
            )
        commands, chunks = self._store.decisions.spent(agent, time.time_ns() - _MINUTE_NS)
        if commands >= budget.commands_per_minute:
            return (
                f"over budget: {commands} commands of {agent!r} within a minute, {budget.commands_per_minute} allowed"
            )
        allowed = budget.prefetched_chunks_per_minute
        if action.kind == "prefetch" and chunks + len(action.hashes) > allowed:
            return (
                f"over budget: {chunks} chunks prefetched for {agent!r} within a minute and {len(action.hashes)} more "
                f"asked for, {allowed} allowed"
            )
        return None
