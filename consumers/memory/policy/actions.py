# SPDX-License-Identifier: Apache-2.0
"""What the policy may decide: a command with its reason, or nothing with its reason. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from semkv.consumers.memory.chains import Chain

__all__ = ["Action", "Moment", "Situation", "nothing"]


class Moment:
    """The names of the agent's moments, as decisions record them."""

    TURN_STARTED = "turn_started"
    TOOL_CALL_STARTED = "tool_call_started"
    TOOL_CALL_ENDED = "tool_call_ended"
    WILL_RESUME = "will_resume"
    COMPACTED = "compacted"
    TOPIC_CLOSED = "topic_closed"
    SESSION_ENDED = "session_ended"
    CONTINUED = "continued"  # a search found what to go on with


@dataclass(frozen=True)
class Situation:
    """What the map knows at a moment."""

    session: str
    chain: Chain | None = None  # what the session's next request will most likely extend
    old: tuple[Chain, ...] = ()  # chains that are over
    keep: tuple[Chain, ...] = ()  # chains that are not, of this and other sessions
    in_ms: int | None = None  # when the next request is expected; None: not known
    load_ms: float | None = None  # how long loading the chain took before, None before the first time
    retained: bool = False


@dataclass(frozen=True)
class Action:
    """One command to publish, or nothing."""

    kind: str  # prefetch, evict, retain, release, nothing
    reason: str
    chain: Chain | None = None
    hashes: tuple[int, ...] = ()
    expires_in_ms: int | None = None
    delay_ms: int = 0
    tiers: tuple[str, ...] | None = None
    ttl_s: int = 0
    details: dict[str, object] = field(default_factory=dict)


def nothing(reason: str, **details: object) -> list[Action]:
    return [Action("nothing", reason, details=details)]
