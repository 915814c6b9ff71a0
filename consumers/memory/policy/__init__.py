# SPDX-License-Identifier: Apache-2.0
"""Agent moments to commands: the rules, their actions and each agent's budget."""

from __future__ import annotations

from semkv.consumers.memory.policy.actions import Action, Moment, Situation, nothing
from semkv.consumers.memory.policy.budgets import Budget, Budgets
from semkv.consumers.memory.policy.rules import Policy, Timing

__all__ = ["Action", "Budget", "Budgets", "Moment", "Policy", "Situation", "Timing", "nothing"]
