# SPDX-License-Identifier: Apache-2.0
"""The memory map: what an agent remembers of its sessions, and what it asks of the engines' caches because of it.

``async with MemoryMap(kv, store=Store(path)) as memory`` follows the engines' ``finished`` events from where it
stopped, keeps session, topic and intent to chunk chain, finds the chain for "continue what we discussed" and turns the
agent's moments into commands. Moments never raise for a bus or an engine that is away: each returns its decisions,
which say what was done and why. One asyncio loop; the store may be opened by another process to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semkv.bus import client as bus_client
from semkv.bus import hashes as codec
from semkv.consumers.memory import worth
from semkv.consumers.memory.actor import Actor
from semkv.consumers.memory.chains import Chain
from semkv.consumers.memory.embeddings import Embedding
from semkv.consumers.memory.intake import Intake
from semkv.consumers.memory.policy import Action, Budget, Budgets, Moment, Policy, Situation, nothing
from semkv.consumers.memory.ports import KV
from semkv.consumers.memory.search import Finder, Found
from semkv.consumers.memory.spans import DecisionSpans
from semkv.consumers.memory.store import Decision, Session, Store

__all__ = ["Continuation", "MemoryMap"]

log = logging.getLogger(__name__)

_MAIN_TOPIC = "main"
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Continuation:
    """What a search found, the chain behind it and what was done about it."""

    found: Found
    chain: Chain | None
    decisions: tuple[Decision, ...]

    @property
    def command_id(self) -> str | None:
        """The prefetch that warms it, if one was published."""
        return next((d.command_id for d in self.decisions if d.command_id), None)


class MemoryMap:
    """The map of one or more agents of a tenant."""

    def __init__(self, kv: KV, *, store: Store | None = None, agent: str = "agent", embedding: Embedding | None = None,
                 policy: Policy | None = None, budget: Budget | None = None, budgets: dict[str, Budget] | None = None,
                 spans: DecisionSpans | None = None, enabled: bool = True) -> None:  # fmt: skip
        """``enabled`` false: the map goes on remembering, and decides to do nothing."""
        self.store = store or Store()
        self.agent = agent
        self.enabled = enabled
        self.policy = policy or Policy()
        self._kv = kv
        self._spans = spans or DecisionSpans(getattr(kv, "tracer", None))
        self._actor = Actor(kv, self.store, Budgets(self.store, budget, budgets), self._spans)
        self._finder = Finder(self.store, embedding)
        self._intake = Intake(self.store, agent)
        self._pauses: dict[str, tuple[str, float]] = {}
        self._task: asyncio.Task[None] | None = None
        self._outcomes: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._awaited: dict[str, list[asyncio.Future[Chain | None]]] = {}

    async def __aenter__(self) -> MemoryMap:
        self._task = asyncio.create_task(self._follow_on())
        if isinstance(self._kv, bus_client.KV):
            self._outcomes = asyncio.create_task(self._follow_outcomes(self._kv))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops following and drops what is planned; the store stays open for whoever made it."""
        for task in [self._task, self._outcomes, *self._background]:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._task = None
        await self._actor.close()

    # -- what the engines tell -----------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Takes in finished events, from where the last run stopped, until cancelled or the client is closed.

        An event that cannot be taken in is logged and passed over: it must not keep the others out.
        """
        stream = self._kv.finished(**self._intake.resume())
        async for event in stream:
            try:
                self.take(event)
            except Exception:
                log.exception("finished event %s was passed over", getattr(event, "request_id", "?"))
            self._intake.reached(getattr(stream, "last_seq", 0))

    async def _follow_on(self) -> None:
        while True:
            try:
                await self.follow()
                return
            except Exception as error:  # the bus may be away for longer than its client waits
                log.warning("following finished events: %s; trying again", error)
                await asyncio.sleep(_AGAIN_S)

    async def _follow_outcomes(self, kv: bus_client.KV) -> None:
        while True:
            try:
                async for event in worth.outcomes(kv):
                    worth.put(self.store, event)
            except Exception as error:
                log.warning("following outcomes: %s; trying again", error)
            await asyncio.sleep(_AGAIN_S)

    def take(self, event: Any) -> Chain | None:
        """Takes in one event; the chain that it added, if any."""
        chain, dropped = self._intake.take(event)
        for waiter in self._awaited.pop(event.request_id, ()):
            if not waiter.done():
                waiter.set_result(chain)
        if chain is not None and dropped is not None:
            self._later(self._compacted(chain.session, dropped, chain))
        return chain

    async def heard_of(self, request_id: str, timeout: float = 10.0) -> Chain | None:
        """Waits for a request's ``finished`` event, which comes a moment after its answer, and returns its chain.

        None if none came within ``timeout`` seconds, or if its hashes are not known.
        """
        if (known := self.store.chains.of_request(request_id)) is not None:
            return known
        waiter: asyncio.Future[Chain | None] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(request_id, []).append(waiter)
        try:
            done, _ = await asyncio.wait([waiter], timeout=timeout)
            return waiter.result() if done else None
        finally:
            waiters = self._awaited.get(request_id, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._awaited.pop(request_id, None)

    async def write_back(self, session: str, chunk_hashes: Sequence[str] | Sequence[int] | None, *, agent: str = "",
                         request_id: str = "") -> Chain | None:  # fmt: skip
        """Takes in what an answer's ``kv_transfer_params`` carried, for whoever has no event stream.

        None and an empty list are "not known" and change nothing. Raises ``HashError`` for text that is no hash.
        """
        if not chunk_hashes:
            return None
        parsed = tuple(h if isinstance(h, int) else codec.parse(h, i) for i, h in enumerate(chunk_hashes))
        row = self._session(session, agent)
        before = self.store.chains.current(session)
        chain = Chain(session, parsed, request_id=request_id, topic=row.topic or _MAIN_TOPIC,
                      domain=before.domain if before else "", tenant=before.tenant if before else "default",
                      finished_at=time.time_ns())  # fmt: skip
        dropped = self._intake.keep(chain)
        if dropped is not None:
            await self._compacted(session, dropped, chain)
        return chain

    # -- what the agent tells ------------------------------------------------------------------------------------

    async def note(
        self,
        session: str,
        text: str,
        *,
        topic: str | None = None,
        intent: str | None = None,
        role: str = "user",
        agent: str = "",
        request_id: str = "",
        at: int | None = None,
    ) -> None:
        """Remembers what was said, under the topic named or the session's present one.

        ``request_id`` (the answer's id) ties the engine's chain to the topic exactly, whichever of both comes first.
        """
        row = self._session(session, agent)
        name = topic or row.topic or _MAIN_TOPIC
        at = at or time.time_ns()
        is_new = all(known.topic != name for known in self.store.sessions.topics(session))
        topic_id = self.store.sessions.ensure_topic(session, name, intent=intent, at=at)
        self.store.sessions.touch(session, topic=name, ended=False, at=at)
        # A name that the agent gave is itself something to find the topic by.
        labels = [label for label in ((name if topic and is_new else ""), intent or "") if label]
        for kind, said in [*(("label", label) for label in labels), (role, text)]:
            if said.strip():
                embedding, vector = await self._finder.vector(said)
                self.store.notes.add(topic_id, kind, said, embedding, vector, at)
        if request_id:
            adopted = self.store.chains.name_request(request_id, session, name, at)
            if adopted is not None:
                dropped = self._intake.keep(adopted)
                if dropped is not None:
                    await self._compacted(session, dropped, adopted)

    async def find(self, query: str, *, session: str | None = None, agent: str = "", limit: int = 5) -> Found:
        """The topics that a sentence may mean, best first, with the reasons."""
        with self._spans.searching(session or "") as span:
            found = await self._finder.find(query, agent=agent or self.agent, session=session, limit=limit)
            span(found)
        return found

    def chain(self, session: str, topic: str | None = None) -> Chain | None:
        """The chain that going on with a session, or with one of its topics, would read."""
        return self.store.chains.for_topic(session, topic) if topic else self.store.chains.current(session)

    async def continue_with(self, query: str, *, session: str | None = None, agent: str = "", in_ms: int | None = None,
                            moment_id: str = "") -> Continuation:  # fmt: skip
        """Finds what a sentence wants to go on with and warms its chain; only candidates when it is not sure."""
        agent = agent or self.agent
        with self._spans.searching(session or "") as span:
            found = await self._finder.find(query, agent=agent, session=session)
            span(found)
            best = found.best if found.sure else None
            chain = self.chain(best.session, best.topic) if best else None
            where = best.session if best else session or ""
            now = self._situation(where, chain=chain, in_ms=in_ms)
            actions = self.policy.continued(now)
            if best is None:
                actions = [replace(actions[0], kind="nothing", reason=found.why)]
            details = {"query": query, "why": found.why, "embedding": found.embedding,
                       "candidates": [f"{c.session}/{c.topic} {c.score}" for c in found.candidates[:3]]}  # fmt: skip
            actions = [replace(action, details={**action.details, **details}) for action in actions]
            decisions = await self._perform(agent, where, Moment.CONTINUED, moment_id, actions)
        return Continuation(found, chain, tuple(decisions))

    # -- the agent's moments -------------------------------------------------------------------------------------

    async def turn_started(self, session: str, *, agent: str = "", moment_id: str = "") -> list[Decision]:
        """A prompt of this session is about to be sent."""
        row = self._session(session, agent)
        return await self._perform(
            row.agent, session, Moment.TURN_STARTED, moment_id, self.policy.turn_started(self._situation(session))
        )

    async def tool_call_started(self, session: str, tool: str = "", *, expected_ms: int | None = None, agent: str = "",
                                moment_id: str = "") -> list[Decision]:  # fmt: skip
        """The model waits for a tool; ``expected_ms`` if the agent knows, else what this tool usually takes."""
        row = self._session(session, agent)
        self._pauses[session] = (tool, time.monotonic())
        if expected_ms is None:
            usual = self.store.sessions.tool_ms(row.agent, tool)
            expected_ms = None if usual is None else round(usual)
        actions = self.policy.tool_call_started(self._situation(session, in_ms=expected_ms))
        return await self._perform(row.agent, session, Moment.TOOL_CALL_STARTED, moment_id, actions)

    async def tool_call_ended(self, session: str, *, agent: str = "", moment_id: str = "") -> list[Decision]:
        """The tool is done, the next request is near."""
        row = self._session(session, agent)
        pause = self._pauses.pop(session, None)
        if pause is not None:
            self.store.sessions.learn_tool(row.agent, pause[0], (time.monotonic() - pause[1]) * 1000)
        actions = self.policy.tool_call_ended(self._situation(session))
        return await self._perform(row.agent, session, Moment.TOOL_CALL_ENDED, moment_id, actions)

    async def will_resume(self, session: str, *, in_ms: int, topic: str | None = None, agent: str = "",
                          moment_id: str = "") -> list[Decision]:  # fmt: skip
        """The session's next request comes in about ``in_ms``."""
        if in_ms < 0:
            raise ValueError(f"in_ms: {in_ms} is in the past; give the milliseconds until the session resumes")
        row = self._session(session, agent)
        now = self._situation(session, chain=self.chain(session, topic), in_ms=in_ms)
        return await self._perform(row.agent, session, Moment.WILL_RESUME, moment_id, self.policy.will_resume(now))

    async def compacted(self, session: str, chunk_hashes: Sequence[str] | Sequence[int] | None = None, *,
                        agent: str = "", moment_id: str = "") -> list[Decision]:  # fmt: skip
        """The conversation was rewritten shorter.

        With the new prompt's hashes, what they dropped is evicted now; without, when the next chain of the session
        shows it. None and an empty list are "not known" and evict nothing.
        """
        row = self._session(session, agent)
        if not chunk_hashes:
            self.store.sessions.touch(session, pending="compacted")
            actions = self.policy.compacted(Situation(session))
            return await self._perform(row.agent, session, Moment.COMPACTED, moment_id, actions)
        parsed = tuple(h if isinstance(h, int) else codec.parse(h, i) for i, h in enumerate(chunk_hashes))
        old = self.store.chains.current(session)
        chain = Chain(session, parsed, topic=row.topic or _MAIN_TOPIC, finished_at=time.time_ns(),
                      domain=old.domain if old else "", tenant=old.tenant if old else "default")  # fmt: skip
        self.store.chains.add(chain)
        self.store.sessions.touch(session, pending="")
        return await self._compacted(session, old, chain, moment_id)

    async def topic_closed(self, session: str, topic: str, *, agent: str = "", moment_id: str = "") -> list[Decision]:
        """A topic is over and will not be gone on with."""
        row = self._session(session, agent)
        old = tuple(self.store.chains.own(session, topic))
        self.store.sessions.close_topic(session, topic)
        others = [t.topic for t in self.store.sessions.topics(session) if t.topic != topic and not t.closed]
        keep = [c for name in others if (c := self.store.chains.for_topic(session, name))]
        keep += [leaf for leaf in self.store.chains.leaves(session) if leaf.topic != topic]
        actions = self.policy.topic_closed(Situation(session, old=old, keep=tuple(keep) + self._sharing(session, old)))
        decisions = await self._perform(row.agent, session, Moment.TOPIC_CLOSED, moment_id, actions)
        for chain in old:
            self.store.chains.drop(chain)
        return decisions

    async def session_ended(self, session: str, *, forget: bool = False, agent: str = "",
                            moment_id: str = "") -> list[Decision]:  # fmt: skip
        """The session is over; with ``forget`` it will never be resumed."""
        row = self._session(session, agent)
        await self._actor.withdraw(session, "the session ended")
        old = tuple(self.store.chains.leaves(session))
        now = Situation(
            session, old=old, keep=self._sharing(session, old), retained=self.store.decisions.retained(session)
        )
        actions = self.policy.session_ended(now, forget=forget)
        decisions = await self._perform(row.agent, session, Moment.SESSION_ENDED, moment_id, actions)
        self.store.sessions.touch(session, ended=True)
        if forget:
            self.store.sessions.forget(session)
        return decisions

    # -- asking back ---------------------------------------------------------------------------------------------

    def why(self, command_id: str) -> Decision | None:
        """The decision behind a command."""
        return self.store.decisions.by_command(command_id)

    async def settled(self) -> None:
        """Waits until every command given so far has its outcome in its decision."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._actor.settled()

    async def _perform(
        self, agent: str, session: str, moment: str, moment_id: str, actions: Sequence[Action]
    ) -> list[Decision]:
        if not self.enabled:
            actions = nothing("the map's commands are switched off")
        return await self._actor.perform(agent, session, moment, moment_id, actions)

    def _session(self, session: str, agent: str) -> Session:
        if not session or len(session) > 256:
            raise ValueError(f"session: {session!r:.80} must be 1 to 256 characters")
        row = self.store.sessions.ensure(session, agent or self.agent)
        if agent and row.agent != agent:
            self.store.sessions.claim(session, agent)
            row = replace(row, agent=agent)
        return row

    def _situation(self, session: str, *, chain: Chain | None = None, in_ms: int | None = None) -> Situation:
        chain = chain or (self.store.chains.current(session) if session else None)
        load = self._actor.load_ms(chain.domain, len(chain.hashes)) if chain else None
        return Situation(session, chain=chain, in_ms=in_ms, load_ms=load)

    def _sharing(self, session: str, old: Sequence[Chain]) -> tuple[Chain, ...]:
        return tuple(chain for one in old for chain in self.store.chains.sharing(one, but_session=session))

    async def _compacted(self, session: str, old: Chain | None, new: Chain, moment_id: str = "") -> list[Decision]:
        gone = (old,) if old is not None else ()
        keep = [leaf for leaf in self.store.chains.leaves(session) if old is None or leaf.hashes != old.hashes]
        now = Situation(session, chain=new, old=gone, keep=(*keep, *self._sharing(session, gone)))
        row = self._session(session, "")
        decisions = await self._perform(row.agent, session, Moment.COMPACTED, moment_id, self.policy.compacted(now))
        if old is not None and old.hashes != new.hashes:
            self.store.chains.drop(old)
        return decisions

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
