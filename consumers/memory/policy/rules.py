# SPDX-License-Identifier: Apache-2.0
"""The policy: an agent's moments to commands. Pure rules, no clock, no I/O, replaceable as a whole.

Two thoughts carry it. *Prefetch at pause*: when a tool runs or a person reads, loading disturbs nobody, and being early
costs only room in the fast tier, while being late costs everything; so the load starts at once, or, when the pause is
longer than the fast tier is likely to keep what was loaded (``hold_ms``), that long before its end. Every prefetch has
the moment it is needed as its deadline. *Evict only what is known to be over*: what a compaction or a closed topic
dropped and no chain known to the map still uses; whatever is not known evicts nothing, and the ranks still refuse what
other conversations share. The last tier is kept when a session ends, since it may be resumed another day.
"""

from __future__ import annotations

from dataclasses import dataclass

from semkv.consumers.memory.chains import Chain
from semkv.consumers.memory.policy.actions import Action, Situation, nothing

__all__ = ["Policy", "Timing"]


@dataclass(frozen=True)
class Timing:
    """The policy's figures, in milliseconds where not named otherwise."""

    turn_expires_ms: int = 2_000
    unknown_pause_ms: int = 30_000
    hold_ms: int = 30_000
    least_lead_ms: int = 50
    margin: float = 2.0
    retain_slack_s: int = 30
    retain_most_s: int = 600


class Policy:
    """The default rules."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.timing = timing or Timing()

    def turn_started(self, now: Situation) -> list[Action]:
        """The prompt is on its way: load what it will begin with, or forget it."""
        if now.chain is None:
            return nothing("no chain of this session is known yet")
        return [
            Action("prefetch", "a turn starts and will begin with this chain", now.chain, now.chain.hashes,
                   expires_in_ms=self.timing.turn_expires_ms)
        ]  # fmt: skip

    def tool_call_started(self, now: Situation) -> list[Action]:
        """A pause: keep the chain from being pushed out, and have it loaded when the tool is done."""
        if now.chain is None:
            return nothing("no chain of this session is known yet")
        pause = now.in_ms if now.in_ms is not None else self.timing.unknown_pause_ms
        ttl = min(self.timing.retain_most_s, -(-pause // 1000) + self.timing.retain_slack_s)
        known = "a tool runs for about" if now.in_ms is not None else "a tool runs, for how long is not known, at most"
        retain = Action("retain", f"{known} {pause} ms", now.chain, now.chain.hashes, ttl_s=ttl)
        return [retain, self._ahead(now, now.chain, pause, f"{known} {pause} ms")]

    def tool_call_ended(self, now: Situation) -> list[Action]:
        """The pause is over; the retain runs out by itself, the next request is near."""
        return self.turn_started(now)

    def will_resume(self, now: Situation) -> list[Action]:
        """The agent says when: be there in time."""
        if now.chain is None:
            return nothing("no chain of this session is known yet")
        wait = now.in_ms if now.in_ms is not None else self.timing.turn_expires_ms
        return [self._ahead(now, now.chain, wait, f"the session resumes in {wait} ms")]

    def continued(self, now: Situation) -> list[Action]:
        """A search found the chain to go on with."""
        if now.chain is None:
            return nothing("the topic found has no chain: none of its requests has finished, or its hashes are unknown")
        wait = now.in_ms if now.in_ms is not None else self.timing.turn_expires_ms
        return [self._ahead(now, now.chain, wait, "the search found this chain to go on with")]

    def compacted(self, now: Situation) -> list[Action]:
        """A conversation was rewritten: forget what its new prompt no longer contains."""
        if now.chain is None or not now.chain.hashes:
            return nothing("the compacted prompt's chunks are not known, and what is not known evicts nothing")
        return self._drop(now, (now.chain, *now.keep), "the compaction dropped these chunks", None)

    def topic_closed(self, now: Situation) -> list[Action]:
        """A topic is over: forget what only it used, in every local tier."""
        return self._drop(now, now.keep, "the topic is closed and nothing else known uses these chunks", None)

    def session_ended(self, now: Situation, *, forget: bool = False) -> list[Action]:
        """Give back what was retained and free the fast tier; with ``forget`` the local tiers altogether."""
        last = now.old[0] if now.old else None
        actions = [Action("release", "the session ended", last)] if now.retained else []
        tiers = None if forget else ("cpu",)
        why = "the session ended and is to be forgotten" if forget else "the session ended; it may resume from the disk"
        return actions + self._drop(now, now.keep, why, tiers)

    def _ahead(self, now: Situation, chain: Chain, wait_ms: int, why: str) -> Action:
        lead = max(self.timing.least_lead_ms, round(self.timing.margin * (now.load_ms or 0.0)))
        delay = max(0, wait_ms - max(self.timing.hold_ms, lead))
        when = "now" if not delay else f"in {delay} ms, since loaded chunks are counted on for {self.timing.hold_ms} ms"
        return Action("prefetch", f"{why}: load {when}", chain, chain.hashes,
                      expires_in_ms=max(1, wait_ms - delay), delay_ms=delay, details={"lead_ms": lead})  # fmt: skip

    def _drop(self, now: Situation, keep: tuple[Chain, ...], why: str, tiers: tuple[str, ...] | None) -> list[Action]:
        actions = []
        for old in now.old:
            kept = [c.hashes for c in keep if c is not old and (c.tenant, c.domain) == (old.tenant, old.domain)]
            # An equal hash is an equal prefix, so a plain difference of sets is exact.
            shared = {h for chain in kept for h in chain}
            over = tuple(h for h in old.hashes if h not in shared)
            if over:
                actions.append(Action("evict", why, old, over, tiers=tiers))
        if not actions:
            return nothing("nothing to evict: every chunk is still used by a chain that the map knows")
        return actions
