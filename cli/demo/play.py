# SPDX-License-Identifier: Apache-2.0
"""The story: an agent talks about one topic, then another, and comes back to the first.

The agent tells the memory map what it says and what happens to it, and nothing else: which chunks to evict and which to
prefetch, the map's policy decides. What the engine announces and where each chunk lies is read beside it, only to check
what is claimed on the way. Each step leaves what it measured for the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from semkv.bus import KV
from semkv.bus.hashes import to_legacy
from semkv.bus.messages import Finished
from semkv.bus.status import ChunkStatus, State, Tier
from semkv.cli.demo.agent import Answer, Model
from semkv.cli.demo.claims import Claims
from semkv.cli.demo.texts import SYSTEM, Message, Topic
from semkv.cli.devengine.lmcache_hashes import LMCacheHasher
from semkv.consumers.memory import Decision, MemoryMap
from semkv.consumers.memory.chains import common_prefix

EVENT_PATIENCE_S = 30
COMMAND_PATIENCE_S = 60
RESUME_MS = 10_000
"""How soon the agent says its next request comes: the prefetch's deadline."""
ROUNDS = 3
"""How often the way back to topic A is measured, for a median."""


class NoEventError(RuntimeError):
    """An engine answered a request and did not announce it."""


@dataclass
class Measured:
    """What the report shows. Times to first token in seconds."""

    recomputed: list[float] = field(default_factory=list)
    from_disk: list[float] = field(default_factory=list)
    prefetched: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    prefetch: Decision | None = None


class Conversation:
    """One session about one topic: its messages, and what the memory map knows of it."""

    def __init__(self, model: Model, kv: KV, memory: MemoryMap, topic: Topic) -> None:
        self.model = model
        self.kv = kv
        self.memory = memory
        self.topic = topic
        self.session = f"{topic.name}-session"
        self.messages: list[Message] = [SYSTEM]
        self._events: asyncio.Queue[Finished] = asyncio.Queue()
        self._follower: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Conversation:
        stream = self.kv.finished(session=self.session)

        async def follow() -> None:
            async for event in stream:
                await self._events.put(event)

        self._follower = asyncio.create_task(follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)

    @property
    def chain(self) -> tuple[int, ...]:
        """The chunks that going on with the topic would read, as the map knows them."""
        chain = self.memory.chain(self.session, self.topic.name)
        return chain.hashes if chain is not None else ()

    async def ask(self, text: str, *, remember: bool = True) -> tuple[Answer, Finished]:
        """Ask one turn; returns once the map has taken in its `finished` event. Raises NoEventError."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        answer = await self.model.ask(messages, session=self.session)
        if remember:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            await self.memory.note(self.session, text, topic=self.topic.name, request_id=answer.request_id)
        try:
            event = await asyncio.wait_for(self._event_of(answer), EVENT_PATIENCE_S)
        except asyncio.TimeoutError:
            raise NoEventError(
                f"no finished event for request {answer.request_id} within {EVENT_PATIENCE_S} s: "
                "does the engine's log have a line of semkv that says why?"
            ) from None
        return answer, event

    async def _event_of(self, answer: Answer) -> Finished:
        event = await self._events.get()
        while event.request_id != answer.request_id:
            event = await self._events.get()
        # The map follows the same stream by itself.
        await self.memory.heard_of(answer.request_id, EVENT_PATIENCE_S)
        return event


class Play:
    """Plays the story once. `claims.broken` afterwards says whether it held."""

    def __init__(
        self,
        console: Console,
        claims: Claims,
        kv: KV,
        memory: MemoryMap,
        engine: Model,
        plain: Model | None = None,
        hasher: LMCacheHasher | None = None,
        *,
        pool_overflows: bool = True,
    ) -> None:
        """Without `plain` outputs are compared with nothing, without `hasher` hashes only with the answer's.

        `pool_overflows`: the second topic is known to push the first out of DDR; else both are evicted from it.
        """
        self._pool_overflows = pool_overflows
        self._console = console
        self._claims = claims
        self._kv = kv
        self._memory = memory
        self._engine = engine
        self._plain = plain
        self._hasher = hasher
        self.measured = Measured()

    async def run(self, first: Topic, second: Topic) -> None:
        """The whole story."""
        async with (
            Conversation(self._engine, self._kv, self._memory, first) as a,
            Conversation(self._engine, self._kv, self._memory, second) as b,
        ):
            self._say(1, f"topic {first.name}: {len(first.turns)} turns; each finished request is announced on NATS")
            await self._talk(a, first)
            if self._pool_overflows:
                self._say(2, f"topic {second.name}: long enough that {first.name} falls out of DDR onto the SSD")
                await self._talk(b, second)
            else:
                self._say(2, f"topic {second.name}; the session about {first.name} ends and stays on the SSD")
                await self._talk(b, second)
                await self._end(a)
            await self._only_on_disk(a, b)
            self._say(3, f"“{first.resume}”: {'recomputed, ' if self._plain else ''}from the SSD, and prefetched")
            await self._come_back(a, b, first, second)

    async def _talk(self, conversation: Conversation, topic: Topic) -> None:
        for number, turn in enumerate(topic.turns, 1):
            answer, event = await conversation.ask(turn)
            await self._check_event(f"turn {number}", answer, event)

    async def _check_event(self, turn: str, answer: Answer, event: Finished) -> None:
        published = [to_legacy(chunk_hash) for chunk_hash in event.chunk_hashes]
        own, compared = published, ""
        if self._hasher is not None:
            own = await asyncio.to_thread(self._hasher.hashes, answer.prompt_token_ids)
            compared = " = LMCache's own"
        self._claims.check(
            f"{turn}: the event's {len(published)} chunk hashes{compared} = those in the answer",
            bool(published) and published == own and published == answer.chunk_hashes,
            f"{event.prompt_tokens} tokens, {event.lmcache_hit_tokens or 0} from the cache, "
            f"first token after {answer.ttft_s:.2f} s",
        )

    async def _only_on_disk(self, conversation: Conversation, other: Conversation) -> None:
        """Nothing but what the other conversation begins with too may be in DDR: that is not freed for one of them."""
        shared = common_prefix(conversation.chain, other.chain)
        where = await self._where(conversation.chain)
        in_ddr = sum(Tier.CPU in tiers for tiers in where[shared:])
        on_disk = sum(Tier.DISK in tiers for tiers in where)
        but = f", but for the {shared} shared with {other.session}," if shared else ""
        self._claims.check(
            f"{conversation.session}: every chunk is on the SSD and none{but} in DDR",
            in_ddr == 0 and on_disk == len(where) > shared,
            f"{on_disk} of {len(where)} on the SSD, {in_ddr} in DDR",
        )

    async def _come_back(self, a: Conversation, b: Conversation, first: Topic, second: Topic) -> None:
        asked: list[Message] = [*a.messages, {"role": "user", "content": first.resume}]
        for number in range(ROUNDS):
            baseline = None
            if self._plain is not None:
                baseline = await self._plain.ask(asked)
                self.measured.recomputed.append(baseline.ttft_s)

            known = len(a.chain)
            cold, event = await a.ask(first.resume, remember=False)
            self.measured.from_disk.append(cold.ttft_s)
            self.measured.prompt_tokens = len(cold.prompt_token_ids)
            self._same_output(f"round {number + 1}, from the SSD", cold, baseline)
            self._all_hit(known, event)

            await b.ask(second.resume, remember=False)
            await self._leave(a, b)
            await self._continue(a)
            warm, event = await a.ask(first.resume, remember=False)
            self.measured.prefetched.append(warm.ttft_s)
            self._same_output(f"round {number + 1}, prefetched", warm, baseline)
            self._all_hit(len(a.chain), event)
            if number + 1 < ROUNDS:
                await b.ask(second.resume, remember=False)
                await self._end(a)

    async def _leave(self, a: Conversation, b: Conversation) -> None:
        """Both sessions end: DDR is freed of the other topic, and of what the unprefetched request left there."""
        await self._end(a)
        decision = await self._end(b)
        self._claims.check(
            f"{b.session} ended and the map evicted it from DDR: every chunk is removed, absent, or in use by another",
            decision.action == "evict"
            and set(_counts(decision)) <= {ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.SHARED},
            _counted(decision),
        )
        await self._only_on_disk(a, b)

    async def _end(self, conversation: Conversation) -> Decision:
        decisions = await self._memory.session_ended(conversation.session)
        return await self._settled(decisions[-1])

    async def _continue(self, a: Conversation) -> None:
        """“Let's go on”: the map finds the topic and warms its chain."""
        went_on = await self._memory.continue_with(a.topic.resume, in_ms=RESUME_MS)
        best = went_on.found.best
        self._claims.check(
            f"the map finds what “{a.topic.resume}” means",
            went_on.found.sure and best is not None and (best.session, best.topic) == (a.session, a.topic.name),
            went_on.found.why,
        )
        decision = await self._settled(went_on.decisions[-1])
        self.measured.prefetch = decision
        self._console.print(
            f"  {decision.action} of {decision.chunks} chunks: {decision.reason}; {decision.outcome}", highlight=False
        )
        for rank in decision.result.get("ranks", ()):
            self._console.print(
                f"    {rank['instance']} rank {rank['rank']}: {_listed(rank['counts'])}, "
                f"{rank['bytes'] / 1e6:.0f} MB, {rank['ran_ms']:.0f} ms",
                highlight=False,
            )
        where = await self._where(a.chain)
        in_ddr = sum(Tier.CPU in tiers for tiers in where)
        counts = _counts(decision)
        said = sum(counts.get(status, 0) for status in (ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE))
        self._claims.check(
            "the prefetch says what is true: each chunk it calls loaded is in DDR",
            decision.outcome == State.SUCCEEDED and said == in_ddr == len(a.chain),
            f"{said} said, {in_ddr} in DDR",
        )

    async def _settled(self, decision: Decision) -> Decision:
        """The decision with its outcome, once every rank has answered."""
        await asyncio.wait_for(self._memory.settled(), COMMAND_PATIENCE_S)
        return self._memory.why(decision.command_id) or decision if decision.command_id else decision

    async def _where(self, chain: Sequence[int]) -> list[set[str]]:
        """The tiers that hold each chunk, on every rank that has one."""
        result = await (await self._kv.locate(chain)).result(COMMAND_PATIENCE_S)
        parts = [part.chunk_tiers or () for part in result.results]
        return [set.intersection(*(set(tiers) for tiers in column)) for column in zip(*parts, strict=True)]

    def _same_output(self, what: str, answer: Answer, baseline: Answer | None) -> None:
        if baseline is None:
            self._console.print(f"  {what}: first token after {answer.ttft_s:.2f} s", highlight=False)
            return
        self._claims.check(
            f"{what}: output is token for token that of the engine without a cache",
            answer.token_ids == baseline.token_ids and len(answer.token_ids) > 0,
            f"first token after {answer.ttft_s:.2f} s (recomputed: {baseline.ttft_s:.2f} s)",
        )

    def _all_hit(self, chunks: int, event: Finished) -> None:
        hit = event.lmcache_hit_tokens or 0
        self._claims.check(
            f"all {chunks} chunks known of the topic were hits", hit >= chunks * event.chunk_size > 0, f"{hit} tokens"
        )

    def _say(self, number: int, text: str) -> None:
        self._console.print(f"\n[bold]{number}. {text}[/]", highlight=False)


def _counts(decision: Decision) -> dict[str, int]:
    """Chunks by status, over the ranks: the most that any of them counted."""
    counts: dict[str, int] = {}
    for rank in decision.result.get("ranks", ()):
        for status, count in rank["counts"].items():
            counts[status] = max(count, counts.get(status, 0))
    return counts


def _counted(decision: Decision) -> str:
    return _listed(_counts(decision)) or f"{decision.action}: {decision.reason}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
