# SPDX-License-Identifier: Apache-2.0
"""The rank worker: a daemon thread with its own event loop and its own connection to NATS.

`start` returns at once and never fails because of NATS: the worker connects and reconnects for ever, announces its rank
every two seconds, reads its commands from its epoch on, and answers them. `stop` ends it in order. Neither the thread
nor its pool keeps the process from ending. `start` and `stop` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from nats.aio.client import Client

from semkv.bus.clock import BrokerClock
from semkv.bus.connection import Link, close_nats, connect_nats
from semkv.bus.errors import BusError
from semkv.bus.messages import EngineInfo, TierUsage
from semkv.bus.metrics import setup_metrics
from semkv.bus.reader import CommandReader, StreamMessage
from semkv.bus.registry import Announcer
from semkv.bus.settings import BusSettings, SettingsError
from semkv.bus.status import Op, Role
from semkv.bus.streams import ENGINE, HEARTBEAT_S, ensure_streams
from semkv.bus.tasks import cancel_and_wait
from semkv.bus.tracing import NullTracer, setup_tracing
from semkv.consumers.rank.answers import Answers
from semkv.consumers.rank.commands import CommandDesk
from semkv.consumers.rank.counted import Counted
from semkv.consumers.rank.identity import RankIdentity
from semkv.consumers.rank.outbox import CommandTraces, Outbox
from semkv.consumers.rank.pool import DaemonPool
from semkv.consumers.storage.ops import StorageOps

log = logging.getLogger(__name__)

THREADS = 4
_REFUSED_WAIT_S = 5.0
_FLUSH_S = 1.0


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class RankWorker:
    """Serves one rank. Make it in the process that holds the storage, after any fork."""

    def __init__(
        self,
        settings: BusSettings,
        identity: RankIdentity,
        ops: StorageOps,
        *,
        threads: int = THREADS,
        tracer: NullTracer | None = None,
        forest: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`forest`: how much the storage's prefix forest holds, by kind, for the metrics."""
        self._settings = settings
        self._who = identity
        self._ops = ops
        self._threads = threads
        self._tracer = tracer
        self._forest = forest
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_timeout = 5.0
        self._started = threading.Event()
        self._ready = threading.Event()
        self._desk: CommandDesk | None = None
        self._tiers: tuple[TierUsage, ...] = ()
        self._last_seq = 0
        self._announcer: Announcer | None = None
        self.outbox = Outbox()
        """What the rank tells by itself, from any thread."""
        self.traces = CommandTraces()

    def start(self) -> RankWorker:
        """Starts the thread. Returns without waiting for NATS."""
        if self._thread is not None:
            raise RuntimeError("this worker was started before; make a new one")
        name = f"semkv-rank-{self._who.instance}-{self._who.rank}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._started.wait()
        return self

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until the rank reads its commands and has announced itself for the first time."""
        return self._ready.wait(timeout)

    def stop(self, timeout: float = 5.0) -> bool:
        """Ends the worker: commands are answered, the registry entry is taken back. False if it did not end in time."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or not thread.is_alive():
            return True
        self._stop_timeout = max(0.0, timeout * 0.7)
        with contextlib.suppress(RuntimeError):  # the loop may have just ended
            loop.call_soon_threadsafe(self._ask_to_stop)
        thread.join(timeout)
        return not thread.is_alive()

    @property
    def dropped(self) -> dict[str, int]:
        """Messages that could not be read, by kind."""
        return dict(self._desk.dropped) if self._desk is not None else {}

    def _ask_to_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _main(self) -> None:
        self._loop = _new_loop()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except Exception:
            log.exception("the rank worker ended")
        finally:
            self._started.set()
            with contextlib.suppress(Exception):
                for task in asyncio.all_tasks(self._loop):
                    task.cancel()
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._started.set()
        tracer = self._tracer or setup_tracing(f"semkv-rank-{self._who.rank}")
        metrics = setup_metrics(
            f"semkv-rank-{self._who.rank}", {"kv.instance": self._who.instance, "kv.rank": self._who.rank}
        )
        clock, answers, counted = BrokerClock(), Answers(), Counted(metrics)
        self._desk = CommandDesk(
            self._who, self._ops, answers, clock, tracer, threads=self._threads, traces=self.traces, counted=counted
        )
        self._watch(counted)
        answers.start()
        asking = DaemonPool(1, "semkv-tiers")
        refresh = asyncio.ensure_future(self._keep_tiers(asking))
        telling = asyncio.ensure_future(self.outbox.run(tracer))
        try:
            while not self._stop.is_set():
                nc, link = await self._connect()
                if nc is None:
                    break
                try:
                    await self._serve(nc, link, clock, answers)
                finally:
                    answers.attach(None)
                    self.outbox.attach(None)
                    await close_nats(nc, _FLUSH_S)
        finally:
            await answers.stop()
            refresh.cancel()
            telling.cancel()
            asking.close()
            if self._tracer is None:
                tracer.shutdown()
            metrics.shutdown()

    def _watch(self, counted: Counted) -> None:
        desk = self._desk
        assert desk is not None
        counted.watch(
            waiting=lambda: desk.inflight,
            unreadable=lambda: desk.dropped,
            worth=lambda: self.outbox.worth,
            forest=self._forest,
            tiers=lambda: self._tiers,
        )

    async def _connect(self) -> tuple[Client | None, Link]:
        assert self._stop is not None
        name = f"semkv-rank {self._who.instance}.{self._who.rank} pid {os.getpid()}"
        complained = ""
        while not self._stop.is_set():
            link = Link()
            attempt = asyncio.ensure_future(connect_nats(self._settings, name=name, link=link, timeout=None))
            try:
                nc = await self._unless_stopped(attempt)
                if nc is not None:
                    return nc, link
            except (BusError, SettingsError) as error:
                # Credentials and servers get mended while engines run on: complain once, keep trying.
                if str(error) != complained:
                    log.error("no commands until this is mended: %s", error)
                    complained = str(error)
                await self._unless_stopped(asyncio.ensure_future(asyncio.sleep(_REFUSED_WAIT_S)))
        return None, Link()

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> Any:
        assert self._stop is not None
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            stop.cancel()
            if not work.done():
                await cancel_and_wait([work])

    async def _serve(self, nc: Client, link: Link, clock: BrokerClock, answers: Answers) -> None:
        assert self._stop is not None
        assert self._desk is not None

        async def ensure() -> None:
            await ensure_streams(nc, self._settings, ENGINE, link=link)

        async def after_reconnect() -> None:
            clock.forget()
            with contextlib.suppress(Exception):  # the reader and the announcer try again by themselves
                await ensure()
            self.outbox.attach(nc)
            await answers.again()

        answers.attach(nc)
        with contextlib.suppress(Exception):
            await ensure()
        self.outbox.attach(nc)
        link.on_reconnect.append(after_reconnect)
        announcer = self._announcer = Announcer(nc, link, self._describe, ensure)
        work: list[Coroutine[Any, Any, None]] = [_over(link)]
        if self._who.role == Role.STORAGE:
            work.append(self._read(nc, link, clock, answers, ensure))
        tasks = [asyncio.ensure_future(part) for part in work]
        announcer.start()
        if self._last_seq:  # a connection that nats-py had given up
            tasks.append(asyncio.ensure_future(answers.again()))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({stop, *tasks[:2]}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._desk.stop(self._stop_timeout)
                await self.outbox.drain()
        finally:
            await cancel_and_wait([stop, *tasks])
            await announcer.stop()
            if nc.is_connected:
                with contextlib.suppress(Exception):
                    await nc.flush(_FLUSH_S)

    async def _read(self, nc: Client, link: Link, clock: BrokerClock, answers: Answers, ensure: Any) -> None:
        reader = CommandReader(
            nc,
            link,
            self._who.instance,
            self._who.domain.fingerprint,
            start_time_ns=self._who.epoch,
            start_seq=self._last_seq + 1 if self._last_seq else None,
            ensure=ensure,
            clock=clock,
            deliver=self._handle,
            room=answers.room,
        )
        async with reader:
            announce = asyncio.ensure_future(self._once_ready(reader))
            try:
                await reader.ended()
            finally:
                announce.cancel()

    def _handle(self, message: StreamMessage) -> None:
        assert self._desk is not None
        self._last_seq = message.seq
        try:
            self._desk.handle(message)
        except Exception:  # one message must never stop the rank
            log.exception("a command could not be handled")

    async def _once_ready(self, reader: CommandReader) -> None:
        await reader.ready()
        if self._announcer is not None:
            self._announcer.announce_now()
            await self._announcer.announced.wait()
        self._ready.set()

    async def _keep_tiers(self, pool: DaemonPool) -> None:
        """Asks the storage how full it is. A storage that hangs costs the figures, not the announcements."""
        loop = asyncio.get_running_loop()
        busy = False

        def taken(tiers: tuple[TierUsage, ...] | None) -> None:
            nonlocal busy
            busy = False
            if tiers is not None:
                self._tiers = tiers

        def ask() -> None:
            tiers = None
            try:
                tiers = tuple(
                    TierUsage(name=t.name, capacity_bytes=t.capacity_bytes, used_bytes=t.used_bytes, chunks=t.chunks)
                    for t in self._ops.tiers()
                )
            except Exception:
                log.debug("the storage gave no figures", exc_info=True)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(taken, tiers)

        while True:
            if not busy and self._who.role == Role.STORAGE:
                busy = True
                pool.submit(ask)
            await asyncio.sleep(HEARTBEAT_S)

    def _describe(self) -> EngineInfo:
        return EngineInfo(
            domain=self._who.domain.fingerprint,
            instance=self._who.instance,
            epoch=self._who.epoch,
            rank=self._who.rank,
            world_size=self._who.world_size,
            role=self._who.role,
            hash_domain=self._who.domain,
            capabilities=tuple(str(op) for op in Op) if self._who.role == Role.STORAGE else (),
            tiers=self._tiers,
            versions=dict(self._who.versions),
            inflight=self._desk.inflight if self._desk is not None else 0,
        )


async def _over(link: Link) -> None:
    await link.closed.wait()
