# SPDX-License-Identifier: Apache-2.0
"""The gateway's side of the bus: which engines a request means, its commands, and what became of them.

A request that names no engine goes to every live one: one command per hash domain, since a REST caller does not know
what a domain is (hashes of another domain are merely missing there). Answers of commands that this process no longer
knows are read from the results stream, so that a command can be asked for over a restart of the gateway until the
stream forgets it (10 minutes). The connection is made in the background and for ever: a gateway starts without NATS and
says so. Raises the bus's errors. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nats.errors

from semkv.bus import codec, ids, subjects
from semkv.bus.client import KV, CommandHandle
from semkv.bus.client.session import Session
from semkv.bus.errors import AuthError, BusError, BusUnavailableError, NoEngineError, ServerTooOldError
from semkv.bus.messages import Accepted, EngineInfo, Result
from semkv.bus.reader import OrderedReader
from semkv.bus.status import Role
from semkv.bus.streams import EVENTS, RESULTS, last_messages, stream_info
from semkv.bus.tracing import NullTracer, ambient_tracer
from semkv.consumers.gateway.answers import Rank, Report
from semkv.consumers.gateway.following import Answers
from semkv.consumers.gateway.settings import GatewaySettings

__all__ = ["Courier", "Target", "Ticket"]

log = logging.getLogger(__name__)

_KNOWN_COMMANDS = 4096
_RETRY_S = 0.5
_CONNECT_S = 3.0
_PUBLISH_S = 3.0


@dataclass(frozen=True)
class Target:
    """Which engines a request means; empty for all."""

    instance: str | None = None
    domain: str | None = None
    model: str | None = None

    def __str__(self) -> str:
        named = [f"{name} {value!r}" for name, value in vars(self).items() if value]
        return " and ".join(named)


class Ticket:
    """Commands on their way, seen as one."""

    def __init__(self, op: str, handles: Sequence[CommandHandle]) -> None:
        self.op = op
        self._handles = list(handles)
        self._accepted: set[tuple[str, int]] = set()
        self.command_ids = tuple(handle.command_id for handle in handles)

    @property
    def expected(self) -> tuple[Rank, ...]:
        return tuple((name.instance, name.rank, handle.domain) for handle in self._handles for name in handle.expected)

    async def accepted(self, timeout: float) -> Report:
        """Waits until every rank accepted, or the time is over."""
        answers = await asyncio.gather(*(handle.accepted(timeout) for handle in self._handles))
        self._accepted |= {(name.instance, name.rank) for names in answers for name in names}
        done = [handle for handle in self._handles if handle.done]
        return await self._report(done, 0.0)

    async def result(self, timeout: float) -> Report:
        """Waits until every rank answered, or the time is over."""
        report = await self._report(self._handles, timeout)
        if len(report.results) < len(report.expected):
            answers = await asyncio.gather(*(handle.accepted(0.0) for handle in self._handles))
            report.accepted |= {(name.instance, name.rank) for names in answers for name in names}
        return report

    async def cancel(self) -> None:
        for handle in self._handles:
            await handle.cancel()

    async def _report(self, handles: Sequence[CommandHandle], timeout: float) -> Report:
        outcomes = await asyncio.gather(*(handle.result(timeout) for handle in handles))
        results = {(r.instance, r.rank): r for outcome in outcomes for r in outcome.results}
        return Report(self.op, self.command_ids, self.expected, set(self._accepted), results)


class Courier:
    """Publishes commands and reads what comes back."""

    def __init__(self, settings: GatewaySettings, tracer: NullTracer | None = None) -> None:
        self._settings = settings
        self._own_tracer = ambient_tracer("semkv-gateway") if tracer is None else None
        self._kv = KV(
            settings.bus, client=ids.client_name("gateway"), tracer=tracer or self._own_tracer, timeout=_CONNECT_S
        )
        self._known: OrderedDict[str, Ticket] = OrderedDict()
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last: Session | None = None
        self.trouble = "no server has answered yet, check SEMKV_NATS_URL"

    @property
    def tracer(self) -> NullTracer:
        return self._kv.tracer

    def start(self) -> None:
        self._task = asyncio.create_task(self._connect())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._kv.close()
        if self._own_tracer is not None:
            await asyncio.to_thread(self._own_tracer.shutdown)

    async def _connect(self) -> None:
        logged = ""
        while True:
            try:
                self._last = await self._kv.session()
                self._up.set()
                return
            except (BusError, OSError, ValueError) as error:
                self.trouble = str(error)
                fatal = isinstance(error, (AuthError, ServerTooOldError, ValueError))
                if str(error) != logged:
                    (log.error if fatal else log.warning)("the gateway goes on trying: %s", error)
                    logged = str(error)
            await asyncio.sleep(_RETRY_S)

    @property
    def connected(self) -> bool:
        return self._last is not None and self._last.nc.is_connected

    async def _session(self) -> Session:
        """The connection; an error at once where there has never been one, within moments where it is away."""
        if not self._up.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._up.wait(), self._settings.accept_s)
        if not self._up.is_set():
            raise BusUnavailableError(f"no connection to NATS at {self._settings.bus.shown_url}: {self.trouble}")
        session = await self._kv.session()
        deadline = asyncio.get_running_loop().time() + self._settings.accept_s
        while not session.nc.is_connected:
            if asyncio.get_running_loop().time() > deadline:
                raise BusUnavailableError(f"the connection to NATS at {self._settings.bus.shown_url} is away")
            await asyncio.sleep(0.02)
            session = await self._kv.session()
        self._last = session
        return session

    async def engines(self) -> list[EngineInfo]:
        """The live ranks."""
        session = await self._session()
        await session.registry.settled()
        return session.registry.live()

    def live(self) -> list[EngineInfo]:
        """The live ranks as known now, without waiting."""
        return self._last.registry.live() if self._last is not None else []

    async def send(self, op: str, target: Target, *args: Any, traceparent: str | None, **options: Any) -> Ticket:
        """Publishes a command to every domain that the target names; raises NoEngineError if there is none."""
        session = await self._session()
        ranks = await session.registry.settled(target.instance, target.domain)
        ranks = [info for info in ranks if target.model in (None, info.hash_domain.model)]
        if not ranks:
            live = sorted({f"{i.instance} ({i.hash_domain.model}, {i.domain})" for i in session.registry.live()
                           if i.role == Role.STORAGE})  # fmt: skip
            wanted = f" for {target}" if str(target) else ""
            raise NoEngineError(f"no live engine{wanted}; live: {', '.join(live) or 'none, is one running?'}")
        method = getattr(self._kv, op)
        try:
            handles = await asyncio.wait_for(
                asyncio.gather(
                    *(method(*args, domain=domain, instance=target.instance, traceparent=traceparent, **options)
                      for domain in sorted({info.domain for info in ranks}))
                ),
                _PUBLISH_S,
            )  # fmt: skip
        except asyncio.TimeoutError:
            raise BusUnavailableError(
                f"NATS did not confirm the {op} within {_PUBLISH_S:g} s: it may run or not; a repeat does no harm"
            ) from None
        ticket = Ticket(op, handles)
        for handle in handles:
            for command_id in handle.command_ids:
                self._known[command_id] = ticket
        while len(self._known) > _KNOWN_COMMANDS:
            self._known.popitem(last=False)
        return ticket

    async def find(self, command_id: str, wait: float = 0.0) -> Report | None:
        """What is known of a command of this tenant, whoever gave it; None if nothing is.

        ``wait`` is for commands of this process; of others there is only what the stream has.
        """
        ticket = self._known.get(command_id)
        if ticket is not None:
            return await ticket.result(wait)
        session = await self._session()
        tenant = subjects.token(self._settings.bus.tenant)
        results: dict[tuple[str, int], Result] = {}
        accepted: dict[tuple[str, int], Accepted] = {}
        try:
            where = [f"{subjects.PREFIX}.{tenant}.*.res.*.{command_id}.>"]
            async for subject, headers, payload in last_messages(session.nc, RESULTS, where):
                with contextlib.suppress(codec.DecodeError):
                    answer = codec.decode(subject, headers, payload)
                    if isinstance(answer, Result):
                        results[answer.instance, answer.rank] = answer
                    elif isinstance(answer, Accepted):
                        accepted[answer.instance, answer.rank] = answer
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailableError(f"the results stream cannot be read: {error or type(error).__name__}") from None
        answers: list[Result | Accepted] = [*results.values(), *accepted.values()]
        if not answers:
            return None
        expected = tuple(sorted({(a.instance, a.rank, a.domain) for a in answers}))
        return Report(str(answers[0].op), (command_id,), expected, set(accepted), results)

    async def cancel(self, command_id: str) -> bool:
        """Asks the ranks to stop a command; False if this process does not know it."""
        ticket = self._known.get(command_id)
        if ticket is None:
            return False
        await self._session()
        await asyncio.wait_for(ticket.cancel(), _PUBLISH_S)
        return True

    async def answers(self, instance: str | None = None) -> Answers:
        """What ranks answer to anybody's commands of this tenant, from now on."""
        session = await self._session()
        tenant = subjects.token(self._settings.bus.tenant)
        where = subjects.token(instance) if instance else "*"
        return Answers(session.nc, f"{subjects.PREFIX}.{tenant}.*.res.*.*.{where}.*")

    async def events(
        self, types: Sequence[str], *, instance: str | None = None, after: int | None = None, last: int | None = None
    ) -> Events:
        """The tenant's events from now on, after a stream sequence, or from so many before now on."""
        session = await self._session()
        try:
            state = (await stream_info(session.nc, EVENTS))["state"]
        except (nats.errors.Error, asyncio.TimeoutError, OSError) as error:
            raise BusUnavailableError(f"the events stream cannot be read: {error or type(error).__name__}") from None
        first, newest = int(state["first_seq"]), int(state["last_seq"])
        tenant = subjects.token(self._settings.bus.tenant)
        where = subjects.token(instance) if instance else "*"
        filters = [f"{subjects.PREFIX}.{tenant}.*.evt.{where}.{kind}" for kind in types]
        start = max(newest - (last or 0) + 1, first, 1) if after is None else min(after, newest) + 1
        reader = OrderedReader(session.nc, session.link, EVENTS, filters, start_seq=start)
        lost = (after + 1, first - 1) if after is not None and after + 1 < first else None
        return Events(reader, start - 1, lost)


@dataclass
class Events:
    """An open reader, where it starts, and what was asked for and is no longer kept."""

    reader: OrderedReader
    position: int
    lost: tuple[int, int] | None
