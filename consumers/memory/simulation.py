# SPDX-License-Identifier: Apache-2.0
"""A SIMULATION of lead times: how early should a resuming session be prefetched?

No engine runs here. Sessions pause and come back; a fast tier of limited room keeps the chunks used last; a disk loads
one chain at a time at a fixed rate. What a prefetch is worth then depends on its lead alone: too late and the request
waits for the rest of the load, too early and other sessions' chunks push it out before it is used. The commands are
those of the real ``Policy`` (its ``will_resume``), told a resume time that is wrong by a random factor, as a person's
or a tool's is. Compared with no prefetch and with an oracle that knows every time and loads just in time. The figures
say how the policy behaves under this model, and nothing about any machine. Deterministic for a seed.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from semkv.consumers.memory.chains import Chain
from semkv.consumers.memory.policy import Policy, Situation, Timing

__all__ = ["Figures", "Model", "simulate", "sweep", "table"]


@dataclass(frozen=True)
class Model:
    """The world: how many sessions, how long they pause, how fast chunks load and how many fit."""

    sessions: int = 24
    turns: int = 40
    pause_ms: float = 8_000.0  # median of a log-normal
    pause_spread: float = 1.0
    guess_spread: float = 0.3  # sigma of the factor by which a predicted pause is wrong
    chunks: int = 60
    grows: int = 2
    chunk_ms: float = 1.5
    fast_chunks: int = 700
    seed: int = 7


@dataclass
class Figures:
    """What became of the requests and of what was prefetched for them."""

    name: str
    requests: int = 0
    waited_ms: float = 0.0
    prefetched: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    redundant: int = 0

    @property
    def mean_wait_ms(self) -> float:
        return self.waited_ms / self.requests if self.requests else 0.0

    def share(self, what: str) -> float:
        return float(getattr(self, what)) / self.prefetched if self.prefetched else 0.0


@dataclass
class _Load:
    session: int
    missing: int  # chunks still to load when it began
    began: float
    ends: float


@dataclass
class _World:
    """The fast tier and the disk."""

    model: Model
    resident: OrderedDict[int, int] = field(default_factory=OrderedDict)  # session -> chunks in the fast tier
    disk_free: float = 0.0
    loads: dict[int, _Load] = field(default_factory=dict)  # a session's load under way
    pending: dict[int, int] = field(default_factory=dict)  # prefetched chunks of a session not used yet

    def hold(self, session: int, chunks: int, figures: Figures) -> None:
        """Puts a session's chunks in, youngest; the oldest sessions' last chunks go out."""
        self.resident[session] = chunks
        self.resident.move_to_end(session)
        over = sum(self.resident.values()) - self.model.fast_chunks
        for other in list(self.resident):
            if over <= 0:
                break
            if other == session and len(self.resident) > 1:
                continue
            gone = min(over, self.resident[other])
            self.resident[other] -= gone
            over -= gone
            lost = min(gone, self.pending.get(other, 0))
            if lost:
                self.pending[other] -= lost
                figures.wasted += lost
            if not self.resident[other]:
                del self.resident[other]

    def load(self, session: int, wanted: int, now: float) -> _Load:
        """Begins to load what is missing, once the disk is free."""
        missing = max(0, wanted - self.resident.get(session, 0))
        began = max(now, self.disk_free)
        ends = began + missing * self.model.chunk_ms
        self.disk_free = ends
        return _Load(session, missing, began, ends)


def simulate(model: Model, name: str, lead_ms: float | None, *, oracle: bool = False) -> Figures:
    """One run: ``lead_ms`` is the policy's ``hold_ms``; None prefetches nothing; an oracle knows all times."""
    dice = random.Random(model.seed)
    policy = Policy(Timing(hold_ms=round(lead_ms or 0), least_lead_ms=0, margin=0.0))
    figures = Figures(name)
    world = _World(model)
    sizes = [model.chunks + dice.randrange(model.chunks) for _ in range(model.sessions)]
    left = [model.turns] * model.sessions
    events: list[tuple[float, int, str, int]] = []
    order = 0

    def at(when: float, kind: str, session: int) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, kind, session))

    def pause(session: int, now: float) -> None:
        length = dice.lognormvariate(0.0, model.pause_spread) * model.pause_ms
        guess = length * dice.lognormvariate(0.0, model.guess_spread)
        at(now + length, "resume", session)
        if oracle:
            need = sizes[session] * model.chunk_ms
            at(max(now, now + length - 1.25 * need), "prefetch", session)
        elif lead_ms is not None:
            chain = Chain(str(session), (session + 1,))
            (action,) = policy.will_resume(Situation(str(session), chain=chain, in_ms=max(1, round(guess))))
            at(now + action.delay_ms, "prefetch", session)

    for session in range(model.sessions):
        at(dice.uniform(0, model.pause_ms), "resume", session)
    while events:
        now, _, kind, session = heapq.heappop(events)
        if kind == "prefetch":
            _prefetch(world, figures, session, sizes[session], now, at)
        elif kind == "loaded":
            _loaded(world, figures, session, now)
        else:
            _resume(world, figures, session, sizes[session], now)
            sizes[session] += model.grows
            world.hold(session, sizes[session], figures)
            left[session] -= 1
            if left[session]:
                pause(session, now)
    figures.wasted += sum(world.pending.values())
    return figures


def _prefetch(world: _World, figures: Figures, session: int, size: int, now: float,
              at: Callable[[float, str, int], None]) -> None:  # fmt: skip
    if session in world.loads:
        figures.redundant += 1  # asked for already
        return
    load = world.load(session, size, now)
    if not load.missing:
        figures.redundant += 1
        return
    figures.prefetched += load.missing
    world.loads[session] = load
    at(load.ends, "loaded", session)


def _loaded(world: _World, figures: Figures, session: int, now: float) -> None:
    load = world.loads.get(session)
    if load is None or load.ends > now:
        return  # the request came first and took the load over
    del world.loads[session]
    have = world.resident.get(session, 0)
    world.pending[session] = world.pending.get(session, 0) + load.missing
    world.hold(session, have + load.missing, figures)


def _resume(world: _World, figures: Figures, session: int, size: int, now: float) -> None:
    """A request: waits for a load under way, then for what is still missing."""
    figures.requests += 1
    ready = now
    load = world.loads.pop(session, None)
    if load is not None:
        done = min(load.missing, max(0, int((now - load.began) / world.model.chunk_ms)))
        figures.useful += done
        figures.late += load.missing - done
        ready = max(ready, load.ends)
        world.resident[session] = world.resident.get(session, 0) + load.missing
    figures.useful += world.pending.pop(session, 0)
    rest = world.load(session, size, ready)
    if rest.missing:
        ready = rest.ends
    figures.waited_ms += ready - now


LEADS_MS = (0, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 120_000)


def sweep(model: Model | None = None, leads_ms: Sequence[int] = LEADS_MS) -> list[Figures]:
    """No prefetch, the oracle, and the policy at each lead."""
    model = model or Model()
    runs = [simulate(model, "no prefetch", None), simulate(model, "oracle", None, oracle=True)]
    return runs + [simulate(model, f"lead {lead} ms", float(lead)) for lead in leads_ms]


def table(runs: Sequence[Figures]) -> str:
    """The figures for people, and that they are a simulation's."""
    none, oracle = runs[0], runs[1]
    can = none.mean_wait_ms - oracle.mean_wait_ms
    lines = [
        "SIMULATION (a latency model, no engine): what a prefetch's lead is worth",
        f"{'':<16}{'wait ms':>9}{'of oracle':>11}{'useful':>9}{'late':>8}{'wasted':>8}{'chunks':>9}",
    ]
    for run in runs:
        gain = (none.mean_wait_ms - run.mean_wait_ms) / can if can else 0.0
        lines.append(
            f"{run.name:<16}{run.mean_wait_ms:>9.1f}{gain:>10.0%} {run.share('useful'):>9.0%}{run.share('late'):>8.0%}"
            f"{run.share('wasted'):>8.0%}{run.prefetched:>9}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """``python -m semkv.consumers.memory.simulation [--fast-chunks N] [--guess-spread S] …``"""
    parser = argparse.ArgumentParser(description="Sweep a prefetch's lead time in a simulation.")
    default = Model()
    for name in ("sessions", "turns", "pause_ms", "guess_spread", "chunk_ms", "fast_chunks", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    print(table(sweep(replace(default, **vars(parser.parse_args(arguments))))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
