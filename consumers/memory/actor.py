# SPDX-License-Identifier: Apache-2.0
"""Carries out what the policy decided: records, publishes, waits for the outcome, learns from it.

Every action ends as one recorded decision, also one that was not carried out (a budget, a repeat). A moment with an id
is carried out once, over restarts too, and its commands have ids made from it, so that the bus drops a repeat. Without
an id, the same prefetch of the same chain is not asked again while one is under way or has just come back. A failure of
the bus is the decision's outcome and never an exception: an agent's turn does not depend on a cache. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from semkv.bus import hashes as codec
from semkv.bus import ids
from semkv.consumers.memory.outcomes import summarise
from semkv.consumers.memory.policy import Action, Budgets
from semkv.consumers.memory.ports import KV, Handle
from semkv.consumers.memory.spans import DecisionSpans
from semkv.consumers.memory.store import Decision, Store

__all__ = ["Actor"]

log = logging.getLogger(__name__)

_FRESH_S = 5.0
_RESULT_S = 60.0
_LOAD_WEIGHT = 0.3


def digest(hashes: Sequence[int]) -> str:
    """A short name of a set of chunks, for records and comparison."""
    return hashlib.blake2s(codec.pack(tuple(hashes)), digest_size=8).hexdigest() if hashes else ""


def command_id(session: str, moment: str, moment_id: str, index: int) -> str:
    """The same id for the same action of the same moment, wherever and whenever it is decided."""
    text = "\0".join((session, moment, moment_id, str(index)))
    return "moment-" + hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


class Actor:
    """Publishes actions through the bus's client."""

    def __init__(self, kv: KV, store: Store, budgets: Budgets, spans: DecisionSpans | None = None) -> None:
        self._kv = kv
        self._store = store
        self._budgets = budgets
        self._spans = spans or DecisionSpans()
        self._asked: dict[tuple[str, ...], tuple[str, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, tuple[str, asyncio.Task[None], Decision]] = {}
        self._handles: dict[str, tuple[str, Handle]] = {}

    async def perform(self, agent: str, session: str, moment: str, moment_id: str,
                      actions: Sequence[Action]) -> list[Decision]:  # fmt: skip
        """One decision per action, in their order."""
        if moment_id:
            before = self._store.decisions.by_moment(session, moment, moment_id)
            if before:
                return before
        return [
            await self._one(agent, session, moment, moment_id, index, action) for index, action in enumerate(actions)
        ]

    async def _one(self, agent: str, session: str, moment: str, moment_id: str, index: int, action: Action) -> Decision:
        why_not = None if action.kind != "nothing" else action.reason
        key = (session, action.kind, digest(action.hashes), ",".join(action.tiers or ()))
        if why_not is None:
            why_not = self._repeat(key, action) or self._budgets.refusal(agent, action)
        common: dict[str, Any] = {"agent": agent, "session": session, "moment": moment, "moment_id": moment_id}
        details = {**action.details, "wanted": action.kind}
        if action.chain is not None:
            details |= {"request_id": action.chain.request_id, "topic": action.chain.topic,
                        "instance": action.chain.instance, "domain": action.chain.domain}  # fmt: skip
        if why_not is not None:
            decision = self._store.decisions.record(
                command_id=None, action="nothing", reason=why_not, chunks=0, details=details, **common
            )
            self._spans.decided(decision)
            return decision
        given = command_id(session, moment, moment_id, index) if moment_id else ids.uuid7()
        for name in ("expires_in_ms", "delay_ms", "ttl_s", "tiers"):
            if getattr(action, name):
                details[name] = getattr(action, name)
        decision = self._store.decisions.record(
            command_id=given, action=action.kind, reason=action.reason, chunks=len(action.hashes),
            chain_digest=digest(action.hashes), details=details, outcome="waiting" if action.delay_ms else "asked",
            **common,
        )  # fmt: skip
        if action.kind == "evict":
            self._no_longer_loaded(session)
        if action.kind in {"prefetch", "evict"}:
            # Until its result is in; with a deadline no longer than it can be useful.
            valid = (action.delay_ms + (action.expires_in_ms or _RESULT_S * 1000)) / 1000
            self._asked[key] = (given, time.monotonic() + valid)
        self._budgets.under_way[agent] += 1
        task = asyncio.create_task(self._carry_out(decision, action, key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if action.delay_ms:
            self._waiting[given] = (session, task, decision)
        return decision

    def _repeat(self, key: tuple[str, ...], action: Action) -> str | None:
        if action.kind not in {"prefetch", "evict"}:
            return None
        now = time.monotonic()
        for stale in [k for k, (_, until) in self._asked.items() if until < now]:
            del self._asked[stale]
        asked = self._asked.get(key)
        if asked is None:
            return None
        if asked[0] in self._waiting:
            if action.delay_ms:
                return f"already planned as {asked[0]}"
            self._overtake(asked[0], "a moment that needs the chain at once came first")
            return None
        return f"already asked by {asked[0]}"

    def _no_longer_loaded(self, session: str) -> None:
        """What was loaded for the session is being evicted: to ask for it again is no repeat."""
        for key in [k for k, (given, _) in self._asked.items() if k[:2] == (session, "prefetch")
                    and given not in self._waiting]:  # fmt: skip
            del self._asked[key]

    def _is_last(self, key: tuple[str, ...], given: str) -> bool:
        return key in self._asked and self._asked[key][0] == given

    def _done_asking(self, key: tuple[str, ...], given: str) -> None:
        if self._is_last(key, given):
            del self._asked[key]

    async def _carry_out(self, decision: Decision, action: Action, key: tuple[str, ...]) -> None:
        given = decision.command_id or ""
        try:
            if action.delay_ms:
                await asyncio.sleep(action.delay_ms / 1000)
                self._waiting.pop(given, None)
            with self._spans.acting(decision) as traceparent:
                handle = await self._publish(given, decision.session, action, decision.agent, traceparent)
            self._handles[given] = (decision.session, handle)
            result = await handle.result(timeout=_RESULT_S)
            summary = summarise(result)
            # An outcome may have come before the result was read.
            now = self._store.decisions.by_command(given)
            worth = {"worth": now.result["worth"]} if now is not None and "worth" in now.result else {}
            self._store.decisions.finish(decision.id, summary.state, {**summary.details, **worth})
            if action.kind == "prefetch" and action.chain is not None:
                self._learn(action.chain.domain, summary.loaded, summary.ran_ms)
                if summary.state == "succeeded" and self._is_last(key, given):
                    self._asked[key] = (given, time.monotonic() + _FRESH_S)
                    return
            self._done_asking(key, given)
        except asyncio.CancelledError:
            self._done_asking(key, given)
            raise
        except Exception as error:  # whatever the bus raises: the agent's turn goes on without the cache
            self._done_asking(key, given)
            self._store.decisions.finish(decision.id, "failed", {"error": f"{type(error).__name__}: {error}"})
            log.info("%s %s of session %s: %s", action.kind, given, decision.session, error)
        finally:
            self._waiting.pop(given, None)
            self._handles.pop(given, None)
            self._budgets.under_way[decision.agent] -= 1

    async def _publish(self, given: str, session: str, action: Action, agent: str, traceparent: str | None) -> Handle:
        chain = action.chain
        # Every engine of the domain: a router may send the next request to any of them.
        where: dict[str, Any] = {"domain": chain.domain} if chain is not None and chain.domain else {}
        where["traceparent"] = traceparent
        if action.kind == "release":
            return await self._kv.release(session, command_id=given, **where)
        if action.kind == "retain":
            return await self._kv.retain(session, action.hashes, ttl_s=action.ttl_s, command_id=given, **where)
        if action.kind == "evict":
            return await self._kv.evict(action.hashes, session=session, tiers=action.tiers, command_id=given, **where)
        return await self._kv.prefetch(
            action.hashes, session=session, expires_in_ms=action.expires_in_ms, command_id=given,
            budget_bytes=self._budgets.of(agent).bytes_per_prefetch, **where,
        )  # fmt: skip

    def _learn(self, domain: str, loaded: int, ran_ms: float) -> None:
        if loaded <= 0 or ran_ms <= 0:
            return
        name = f"load_ms_per_chunk:{domain}"
        before = self._store.database.meta(name)
        now = ran_ms / loaded
        self._store.database.set_meta(name, repr(now if before is None else float(before) * 0.7 + now * _LOAD_WEIGHT))

    def load_ms(self, domain: str, chunks: int) -> float | None:
        """How long that many chunks took to load in this domain; None before the first time."""
        known = self._store.database.meta(f"load_ms_per_chunk:{domain}")
        return None if known is None else float(known) * chunks

    def _overtake(self, given: str, why: str) -> None:
        waiting = self._waiting.pop(given, None)
        if waiting is not None:
            waiting[1].cancel()
            self._store.decisions.finish(waiting[2].id, "overtaken", {"why": why})

    async def withdraw(self, session: str, why: str) -> None:
        """Drops what was planned for a session and cancels its prefetches under way."""
        for given in [given for given, (owner, _, _) in self._waiting.items() if owner == session]:
            self._overtake(given, why)
        for given, (owner, handle) in list(self._handles.items()):
            decision = self._store.decisions.by_command(given)
            if owner == session and decision is not None and decision.action == "prefetch":
                with contextlib.suppress(Exception):  # a cancel that cannot be sent changes nothing
                    await handle.cancel()

    async def settled(self) -> None:
        """Waits until every command given so far has an outcome."""
        while tasks := [task for task in self._tasks if not task.done()]:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Drops what is planned; what was published goes on in the engines."""
        for given in list(self._waiting):
            self._overtake(given, "the map was closed before it was due")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
