# SPDX-License-Identifier: Apache-2.0
"""The agent's client.

    async with connect("nats://127.0.0.1:4222") as kv:
        handle = await kv.prefetch(chunk_hashes, session="s-1", expires_in_ms=2000)
        outcome = await handle.result(timeout=5)

It reconnects for ever and reads the answers it missed. A command fails at once, before anything is published, when no
live engine serves what it addresses, when the engine's hashes mean other bytes, when the server is too old, or when the
credentials do not allow it (`semkv.bus.errors`). One event loop; see `blocking` for threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from semkv.bus import hashes, ids, subjects
from semkv.bus.client import addressing
from semkv.bus.client.finished import FinishedStream
from semkv.bus.client.gaps import Gap
from semkv.bus.client.handle import CommandHandle, RankName
from semkv.bus.client.retains import Retains
from semkv.bus.client.session import Session
from semkv.bus.domain import HashDomain
from semkv.bus.errors import BusError, BusUnavailableError
from semkv.bus.messages import Accepted, Cancel, Command, EngineInfo, Evict, Locate, Prefetch, Release, Result, Retain
from semkv.bus.settings import BusSettings, SettingsError
from semkv.bus.status import Order, Tier
from semkv.bus.streams import REGISTRY_TTL_S
from semkv.bus.tasks import cancel_and_wait
from semkv.bus.tracing import (
    PRODUCER,
    NullTracer,
    TraceContext,
    ambient_tracer,
    destination,
    extract,
    inject,
    messaging_attributes,
)

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 10.0
_REOPEN_WAIT_S = 1.0
_HANDLES_KEPT = 10_000


class KV:
    """A connected client. Get one from `semkv.bus.connect`."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        client: str | None = None,
        tracer: NullTracer | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._settings = settings
        self._timeout = timeout
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._trouble = ""
        self._handles: dict[str, CommandHandle] = {}
        self._retained = Retains()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._own_tracer = tracer is None
        self.tracer = tracer or ambient_tracer("semkv-agent")
        self.client = client or ids.client_name()
        self.closed = False

    @property
    def tenant(self) -> str:
        return self._settings.tenant

    async def session(self) -> Session:
        """The present connection. For readers that share it; BusUnavailableError if there is none for a while."""
        async with self._opening:
            if self.closed:
                raise BusError("this client is closed")
            if self._session is None:
                self._session = await self._open()
                self._later(self._keep_open())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_TIMEOUT_S
        while self._session.link.closed.is_set():
            if self.closed:
                raise BusError("this client is closed")
            if loop.time() > deadline:
                raise BusUnavailableError(
                    f"NATS ended the connection and no other could be opened so far: {self._trouble}"
                )
            await asyncio.sleep(0.02)
        return self._session

    async def _open(self) -> Session:
        session = Session(self._settings, self.client, self._take)
        await session.open(self._timeout, self._session)
        session.link.on_reconnect.append(self._fetch_pending)
        session.registry.on_epoch.append(self._repeat_retains)
        return session

    async def _keep_open(self) -> None:
        """nats-py reconnects by itself, but gives up for good where the server refuses it; this never does."""
        while not self.closed:
            assert self._session is not None
            await self._session.link.closed.wait()
            self._trouble = self._session.link.last_error or "no reason given"
            log.warning("NATS ended the connection (%s): opening another", self._trouble)
            while not self.closed:
                try:
                    self._session = await self._open()
                    break
                except (BusError, SettingsError) as error:
                    self._trouble = str(error)
                    await asyncio.sleep(_REOPEN_WAIT_S)
            self._later(self._fetch_pending())

    async def close(self) -> None:
        """Ends the client. Commands that were published still run."""
        if self.closed:
            return
        self.closed = True
        await cancel_and_wait(list(self._tasks))
        if self._session is not None:
            await self._session.close()
        if self._own_tracer:
            await asyncio.to_thread(self.tracer.shutdown)

    # commands

    async def prefetch(
        self,
        chunk_hashes: Sequence[int | str],
        *,
        session: str | None = None,
        order: Order | str = Order.PREFIX,
        tier: Tier | str = Tier.CPU,
        expires_in_ms: int | None = None,
        budget_bytes: int | None = None,
        dry_run: bool = False,
        instance: str | None = None,
        domain: str | HashDomain | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> CommandHandle:
        """Load these chunks into a faster tier. Hashes are ints, or text as the engine's API gave it."""
        fields = {
            "session": session, "order": order, "tier": tier, "expires_in_ms": expires_in_ms,
            "budget_bytes": budget_bytes, "dry_run": dry_run,
        }  # fmt: skip
        return await self._command(Prefetch, chunk_hashes, fields, instance, domain, command_id, traceparent)

    async def evict(
        self,
        chunk_hashes: Sequence[int | str],
        *,
        session: str | None = None,
        tiers: Iterable[Tier | str] | None = None,
        force: bool = False,
        dry_run: bool = False,
        instance: str | None = None,
        domain: str | HashDomain | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> CommandHandle:
        """Free what only this conversation needed. Without tiers: the local ones."""
        fields = {
            "session": session, "tiers": None if tiers is None else tuple(tiers), "force": force, "dry_run": dry_run,
        }  # fmt: skip
        return await self._command(Evict, chunk_hashes, fields, instance, domain, command_id, traceparent)

    async def retain(
        self,
        session: str,
        chunk_hashes: Sequence[int | str],
        *,
        ttl_s: int = 600,
        instance: str | None = None,
        domain: str | HashDomain | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> CommandHandle:
        """Keep these chunks, in place of what was kept for the session so far, from being evicted.

        Repeated by itself when an engine process is replaced.
        """
        fields = {"session": session, "ttl_s": ttl_s}
        handle = await self._command(Retain, chunk_hashes, fields, instance, domain, command_id, traceparent)
        self._retained.add(session, handle.domain, instance, addressing.read_hashes(chunk_hashes), ttl_s)
        return handle

    async def release(
        self,
        session: str,
        *,
        instance: str | None = None,
        domain: str | HashDomain | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> CommandHandle:
        """Give back what this client retains for the session."""
        kept_in = self._retained.drop(session)
        domain = kept_in if domain is None else domain
        return await self._command(Release, None, {"session": session}, instance, domain, command_id, traceparent)

    async def locate(
        self,
        chunk_hashes: Sequence[int | str],
        *,
        instance: str | None = None,
        domain: str | HashDomain | None = None,
        command_id: str | None = None,
        traceparent: str | None = None,
    ) -> CommandHandle:
        """Ask which tiers hold each chunk: `result.chunk_tiers` of each rank."""
        return await self._command(Locate, chunk_hashes, {}, instance, domain, command_id, traceparent)

    async def cancel(self, target: CommandHandle | str, *, domain: str | HashDomain | None = None) -> CommandHandle:
        """Stop a command between chunks, by its handle or its id."""
        if isinstance(target, str):
            fields = {"target_command_id": target}
            return await self._command(Cancel, None, fields, None, domain, None, None)
        handle = target
        parts: list[Command] = [
            Cancel(
                tenant=self.tenant, domain=handle.domain, instance=handle.instance, client=self.client,
                command_id=ids.uuid7(), target_command_id=command_id,
            )
            for command_id in handle.command_ids
        ]  # fmt: skip
        return await self._publish(parts, handle.expected, None, None)

    async def _command(
        self,
        model: type[Command],
        chunk_hashes: Sequence[int | str] | None,
        fields: dict[str, Any],
        instance: str | None,
        domain: str | HashDomain | None,
        command_id: str | None,
        traceparent: str | None,
    ) -> CommandHandle:
        wanted = None if chunk_hashes is None else addressing.read_hashes(chunk_hashes)
        session = await self.session()
        target = await addressing.find(session.registry, instance, domain)
        base = {
            "tenant": self.tenant,
            "domain": target.domain,
            "instance": instance or subjects.ALL,
            "client": self.client,
            **fields,
        }
        first_id = command_id or ids.uuid7()
        parts: list[Command] = []
        size = hashes.MAX_PER_COMMAND
        if wanted is not None and not addressing.surely_fits(session.nc, min(size, len(wanted))):
            none: dict[str, Any] = {"chunk_hashes": ()}
            size = min(size, addressing.room_for_hashes(session.nc, model(**base, **none, command_id=first_id)))
        starts = range(0, max(1, len(wanted or ())), size)
        for number, start in enumerate(starts):
            part_id = first_id if number == 0 else (f"{first_id}-{number + 1}" if command_id else ids.uuid7())
            chunk: dict[str, Any] = {} if wanted is None else {"chunk_hashes": wanted[start : start + size]}
            if model is Retain:
                chunk |= {"part": number + 1, "parts": len(starts)}
            parts.append(model(**base, **chunk, command_id=part_id))
        return await self._publish(parts, target.expected, target.full, traceparent)

    async def _publish(
        self,
        parts: list[Command],
        expected: Sequence[RankName],
        domain: HashDomain | None,
        traceparent: str | None,
    ) -> CommandHandle:
        handle = CommandHandle(self, parts, expected, domain)
        for part in parts:
            self._handles[part.command_id] = handle
        while len(self._handles) > _HANDLES_KEPT:
            self._handles.pop(next(iter(self._handles)))
        parent = extract({"traceparent": traceparent}) if traceparent else self.tracer.current()
        try:
            for part in parts:
                await self._publish_part(handle, part, parent)
        except BaseException:
            for part in parts:
                self._handles.pop(part.command_id, None)
            raise
        if handle.duplicate:
            await self.fetch_answers([handle])
        return handle

    async def _publish_part(self, handle: CommandHandle, part: Command, parent: TraceContext | None) -> None:
        template = destination("cmd", part.type)
        with self.tracer.span(f"publish {template}", kind=PRODUCER, parent=parent) as span:
            if self.tracer.enabled:
                subject = subjects.command(part.tenant, part.domain, part.instance, part.type)
                span.put(messaging_attributes("publish", subject, template, message_id=part.command_id))
                span.put({"kv.command_id": part.command_id, "kv.domain": part.domain, "kv.instance": part.instance})
                span.put({"kv.chunks.requested": len(getattr(part, "chunk_hashes", ()))})
                if session_id := getattr(part, "session", None):
                    span.put({"kv.session_id": session_id})
            headers: dict[str, str] = {}
            inject(headers, span.context)
            session = await self.session()
            if await session.publish(part, headers, timeout=PUBLISH_TIMEOUT_S):
                handle.duplicate = True

    # answers

    def _take(self, answer: Accepted | Result) -> None:
        handle = self._handles.get(answer.command_id)
        if handle is not None:
            handle.take(answer)

    async def fetch_answers(self, handles: Sequence[CommandHandle]) -> None:
        """Reads what was answered while nobody listened."""
        session = await self.session()
        await session.fetch([command_id for handle in handles for command_id in handle.command_ids])

    async def _fetch_pending(self) -> None:
        pending = list({id(h): h for h in self._handles.values() if not h.done}.values())
        # The ranks publish their answers again after a reconnect of their own; two looks see either order.
        for wait in (0.1, 2.0):
            await asyncio.sleep(wait)
            pending = [handle for handle in pending if not handle.done]
            if pending and not self.closed:
                await self.fetch_answers(pending)

    def all_gone(self, names: set[RankName]) -> bool:
        """Whether none of these ranks can answer any more: gone from the registry, or another process by now."""
        session = self._session
        if not names or session is None or not session.link.up:
            return False
        if asyncio.get_running_loop().time() - session.link.up_since < REGISTRY_TTL_S:
            live = {(i.instance, i.rank): i.epoch for i in session.registry.live()}
            # Soon after a (re)connect only another epoch is proof; silence is not.
            return all(live.get((n.instance, n.rank), n.epoch) > n.epoch > 0 for n in names)
        live = {(i.instance, i.rank): i.epoch for i in session.registry.live()}
        return all(live.get((n.instance, n.rank)) != n.epoch for n in names)

    def _repeat_retains(self, info: EngineInfo) -> None:
        self._later(self._repeat(info))

    async def _repeat(self, info: EngineInfo) -> None:
        for entry in self._retained.of(info):
            fields = {"session": entry.session, "ttl_s": entry.ttl_s}
            try:
                await self._command(Retain, entry.hashes, fields, info.instance, info.domain, None, None)
            except BusError as error:
                log.warning("retaining for session %s again failed: %s", entry.session, error)

    # what is going on

    def finished(
        self,
        session: str | None = None,
        *,
        instance: str | None = None,
        domain: str | None = None,
        since_ns: int | None = None,
        after: int | None = None,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> FinishedStream:
        """Finished events: from now on, from a time on (`since_ns`), or after a stream sequence (`after`)."""
        return FinishedStream(
            self, session=session, instance=instance, domain=domain, since_ns=since_ns, after=after, on_gap=on_gap
        )

    async def engines(self) -> list[EngineInfo]:
        """The live ranks, once they have had time to announce themselves."""
        session = await self.session()
        await session.registry.settled()
        return session.registry.live()

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("in the background: %s", task.exception())
