# SPDX-License-Identifier: Apache-2.0
"""The story: an agent talks about one topic, then another, and comes back to the first.

Each step says what it does, checks what it claims on the way, and leaves what it measured for the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from semkv.bus import KV, CommandResult
from semkv.bus.hashes import to_legacy
from semkv.bus.messages import Finished
from semkv.bus.status import ChunkStatus, HashesStatus, State, Tier
from semkv.cli.demo.agent import Answer, Model
from semkv.cli.demo.claims import Claims
from semkv.cli.demo.texts import SYSTEM, Message, Topic
from semkv.cli.devengine.lmcache_hashes import LMCacheHasher

EVENT_PATIENCE_S = 30
COMMAND_PATIENCE_S = 60
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
    prefetch: CommandResult | None = None


class Conversation:
    """One session with one engine: its messages, and the chunk chain of its last finished request."""

    def __init__(self, model: Model, kv: KV, session: str) -> None:
        self.model = model
        self.kv = kv
        self.session = session
        self.messages: list[Message] = [SYSTEM]
        self.chain: tuple[int, ...] = ()
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

    async def ask(self, text: str, *, remember: bool = True) -> tuple[Answer, Finished]:
        """Ask one turn; returns the answer and its `finished` event. Raises NoEventError."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        answer = await self.model.ask(messages, session=self.session)
        event = await self._event_of(answer)
        if event.hashes_status == HashesStatus.KNOWN:
            self.chain = event.chunk_hashes
        if remember:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer, event

    async def _event_of(self, answer: Answer) -> Finished:
        async def matching() -> Finished:
            while True:
                event = await self._events.get()
                if event.request_id == answer.request_id:
                    return event

        try:
            return await asyncio.wait_for(matching(), EVENT_PATIENCE_S)
        except asyncio.TimeoutError:
            raise NoEventError(
                f"no finished event for request {answer.request_id} within {EVENT_PATIENCE_S} s: "
                "does the engine's log have a line of semkv that says why?"
            ) from None


class Play:
    """Plays the story once. `claims.broken` afterwards says whether it held."""

    def __init__(
        self,
        console: Console,
        claims: Claims,
        kv: KV,
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
        self._engine = engine
        self._plain = plain
        self._hasher = hasher
        self.measured = Measured()

    async def run(self, first: Topic, second: Topic) -> None:
        """The whole story."""
        async with (
            Conversation(self._engine, self._kv, f"{first.name}-session") as a,
            Conversation(self._engine, self._kv, f"{second.name}-session") as b,
        ):
            self._say(1, f"topic {first.name}: {len(first.turns)} turns; each finished request is announced on NATS")
            await self._talk(a, first)
            if self._pool_overflows:
                self._say(2, f"topic {second.name}: long enough that {first.name} falls out of DDR onto the SSD")
                await self._talk(b, second)
            else:
                self._say(2, f"topic {second.name}; then {first.name} is evicted from DDR and stays on the SSD")
                await self._talk(b, second)
                await self._demote(a)
            await self._only_on_disk(a)
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

    async def _only_on_disk(self, conversation: Conversation) -> None:
        where = await self._where(conversation.chain)
        in_ddr = sum(Tier.CPU in tiers for tiers in where)
        on_disk = sum(Tier.DISK in tiers for tiers in where)
        self._claims.check(
            f"{conversation.session}: every chunk is on the SSD and none in DDR",
            in_ddr == 0 and on_disk == len(where) > 0,
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
            await self._evict(a, b)
            await self._prefetch(a)
            warm, event = await a.ask(first.resume, remember=False)
            self.measured.prefetched.append(warm.ttft_s)
            self._same_output(f"round {number + 1}, prefetched", warm, baseline)
            self._all_hit(len(a.chain), event)
            if number + 1 < ROUNDS:
                await b.ask(second.resume, remember=False)
                await self._demote(a)

    async def _evict(self, a: Conversation, b: Conversation) -> None:
        """Free DDR of the other topic, and of what the unprefetched request left there."""
        await self._demote(a)
        result = await self._demote(b)
        counts = result.counts()
        self._claims.check(
            f"evicted {b.session} from DDR: every chunk is removed, absent, or shared with {a.session}",
            set(counts) <= {ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.SHARED},
            _counted(counts),
        )
        await self._only_on_disk(a)

    async def _demote(self, conversation: Conversation) -> CommandResult:
        # Small chunks hold nothing but the system prompt, which both topics share: only force frees those.
        handle = await self._kv.evict(
            conversation.chain, tiers=[Tier.CPU], session=conversation.session, force=not self._pool_overflows
        )
        return await handle.result(COMMAND_PATIENCE_S)

    async def _prefetch(self, conversation: Conversation) -> None:
        handle = await self._kv.prefetch(conversation.chain, session=conversation.session)
        result = await handle.result(COMMAND_PATIENCE_S)
        self.measured.prefetch = result
        self._console.print(f"  prefetch {conversation.session}: {len(conversation.chain)} chunks asked for")
        for part in result.results:
            self._console.print(
                f"    {part.instance} rank {part.rank}: {_counted(part.counts)}, "
                f"{sum(part.bytes_by_tier.values()) / 1e6:.0f} MB, {part.ran_ms:.0f} ms",
                highlight=False,
            )
        where = await self._where(conversation.chain)
        in_ddr = sum(Tier.CPU in tiers for tiers in where)
        said = sum(result.counts().get(status, 0) for status in (ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE))
        self._claims.check(
            "the prefetch says what is true: each chunk it calls loaded is in DDR",
            result.state == State.SUCCEEDED and said == in_ddr == len(conversation.chain),
            f"{said} said, {in_ddr} in DDR",
        )

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


def _counted(counts: object) -> str:
    items = dict(counts).items() if isinstance(counts, dict) else ()
    return ", ".join(f"{count} {status}" for status, count in items if count) or "nothing"
