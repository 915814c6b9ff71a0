# SPDX-License-Identifier: Apache-2.0
"""`semkv top`'s picture: what passed since the start, the ranks' tiers, the newest results. One event loop."""

from __future__ import annotations

from collections import Counter, deque

from nats.aio.msg import Msg
from rich.console import Group
from rich.table import Table
from rich.text import Text

from semkv.bus import codec
from semkv.bus.messages import EngineInfo, Finished, Outcome, Result
from semkv.cli.output import filled

_BAR = 20
_KEPT = 8


class Seen:
    """What passed on the bus since the start."""

    def __init__(self) -> None:
        self.results: deque[Result] = deque(maxlen=_KEPT)
        self.states: Counter[str] = Counter()
        self.fates: Counter[str] = Counter()
        self.finished = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.unreadable = 0

    async def take(self, message: Msg) -> None:
        try:
            decoded = codec.decode(message.subject, message.headers, message.data)
        except codec.DecodeError:
            self.unreadable += 1
            return
        match decoded:
            case Result():
                self.results.appendleft(decoded)
                self.states[f"{decoded.op} {decoded.state}"] += 1
            case Outcome():
                for fate in ("useful", "redundant", "late", "wasted"):
                    self.fates[fate] += getattr(decoded, fate)
            case Finished() if decoded.part == 1:
                self.finished += 1
                self.prompt_tokens += decoded.prompt_tokens
                self.hit_tokens += decoded.lmcache_hit_tokens or 0

    def as_dict(self, live: list[EngineInfo]) -> dict[str, object]:
        """One picture, for a program."""
        return {
            "engines": [
                info.model_dump(mode="json", include={"instance", "rank", "tiers", "inflight"}) for info in live
            ],
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "commands": dict(self.states),
            "outcomes": dict(self.fates),
            "unreadable": self.unreadable,
        }


def picture(seen: Seen, live: list[EngineInfo], tenant: str) -> Group:
    """One screen."""
    tiers = Table("rank", "tier", "", "filled", "chunks", "in flight", box=None, pad_edge=False)
    for info in live:
        for place, tier in enumerate(info.tiers):
            share = min(tier.used_bytes / tier.capacity_bytes, 1.0) if tier.capacity_bytes else 0.0
            wide = round(share * _BAR)
            tiers.add_row(
                f"{info.instance}.{info.rank}" if not place else "",
                tier.name,
                Text("█" * wide, "green") + Text("░" * (_BAR - wide), "dim"),
                filled(tier.used_bytes, tier.capacity_bytes),
                str(tier.chunks),
                str(info.inflight) if not place else "",
            )
    commands = Table("command", "rank", "state", "chunks", "ms", box=None, pad_edge=False)
    for result in seen.results:
        counts = ", ".join(f"{number} {status}" for status, number in result.counts.items() if number)
        rank = f"{result.instance}.{result.rank}"
        commands.add_row(
            f"{result.op} {result.command_id[-8:]}", rank, str(result.state), counts, f"{result.ran_ms:.1f}"
        )
    share = seen.hit_tokens / seen.prompt_tokens if seen.prompt_tokens else 0.0
    fates = ", ".join(f"{seen.fates[fate]} {fate}" for fate in ("useful", "redundant", "late", "wasted"))
    return Group(
        Text(
            f"tenant {tenant}: {seen.finished} requests finished since this began, {share:.0%} of their tokens from "
            "the cache"
        ),
        Text(f"prefetched chunks: {fates}", "dim"),
        tiers if live else Text("no engine is live", "yellow"),
        commands if seen.results else Text("no command has passed since this began", "dim"),
    )
