# SPDX-License-Identifier: Apache-2.0
"""Who is there: ranks announce themselves every two seconds, clients watch.

Entries are JSON, so that any tool can read the bucket. `Announcer` puts a rank's entry and takes it back when it stops.
`EngineRegistry` starts from what the bucket holds and follows every put; a rank not heard of for the bucket's TTL is
gone. Silence counts only while the link stands: whoever cannot hear cannot judge, and after a restart of the server,
whose bucket is then empty, ranks may be slower to connect again than the client. So a rank that was known stays known
over an outage, until it has been silent for the TTL on a standing link or says itself that it goes; one never heard of
is called absent only after one heartbeat period since the last (re)connect. Both belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from semkv.bus import codec, subjects
from semkv.bus.connection import Link
from semkv.bus.errors import BusUnavailableError
from semkv.bus.messages import EngineInfo
from semkv.bus.status import Role
from semkv.bus.streams import HEARTBEAT_S, REGISTRY, REGISTRY_TTL_S, last_messages
from semkv.bus.tasks import cancel_and_wait

log = logging.getLogger(__name__)

GRACE_S = HEARTBEAT_S + 0.5
DOWN_S = 10.0
RETRY_S = 0.25
"""After an announcement that failed: a client may be waiting for it."""

Ensure = Callable[[], Awaitable[None]]


class Announcer:
    """Keeps one rank's entry alive. `describe` is called for every put and must not block."""

    def __init__(
        self, nc: Client, link: Link, describe: Callable[[], EngineInfo], ensure: Ensure | None = None
    ) -> None:
        self._nc = nc
        self._link = link
        self._describe = describe
        self._ensure = ensure
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complained = ""
        self.announced = asyncio.Event()
        """Set once the registry holds the entry."""

    def start(self) -> None:
        self._link.on_reconnect.append(self._now.set)
        self._task = asyncio.create_task(self._run())

    def announce_now(self) -> None:
        """Puts the entry without waiting for the next period."""
        self._now.set()

    async def stop(self) -> None:
        """Stops and takes the entry back."""
        with contextlib.suppress(ValueError):
            self._link.on_reconnect.remove(self._now.set)
        if self._task is not None:
            await cancel_and_wait([self._task])
        if self._nc.is_connected:
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
                info = self._describe()
                subject = subjects.registry(info.instance, info.rank)
                await self._nc.request(subject, b"", headers={"KV-Operation": "DEL"}, timeout=1.0)

    async def _run(self) -> None:
        while True:
            self._now.clear()
            failed = self._nc.is_connected and not await self._put()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._now.wait(), RETRY_S if failed else HEARTBEAT_S)

    async def _put(self) -> bool:
        try:
            info = self._describe()
            payload, headers = codec.encode(info, json=True)
            subject = subjects.registry(info.instance, info.rank)
            try:
                await self._nc.request(subject, payload, headers=headers, timeout=1.0)
            except nats.errors.NoRespondersError:
                if self._ensure is not None:  # the bucket is gone: a restarted server, or a deleted bucket
                    await self._ensure()
                    await self._nc.request(subject, payload, headers=headers, timeout=1.0)
            self.announced.set()
            return True
        except (nats.errors.Error, asyncio.TimeoutError, OSError) as error:
            log.debug("announcing: %s; trying again", error)
        except Exception as error:
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("announcing this rank failed, it is tried on and on: %s", error)
        return False


@dataclass(frozen=True)
class Engine:
    """One live rank as a client sees it."""

    info: EngineInfo
    heard_at: float
    """Loop time of its last sign of life."""
    heard_s: float
    """The same on the link's clock (`Link.connected_s`)."""


class EngineRegistry:
    """Follows the registry. `on_epoch` is called with the new entry when a known rank comes back with another epoch."""

    def __init__(self, nc: Client, link: Link, *, bucket: bool = True) -> None:
        """`bucket`: whether the bucket itself can be read; across accounts only the puts can."""
        self._nc = nc
        self._link = link
        self._bucket = bucket
        self._entries: dict[str, Engine] = {}
        self._changed = asyncio.Event()
        self._epochs: dict[str, int] = {}
        self.on_epoch: list[Callable[[EngineInfo], None]] = []
        self.dropped = 0
        """Entries that could not be read."""

    async def start(self, before: EngineRegistry | None = None) -> None:
        """Subscribes, then reads what is there. `before` is the registry of a connection that this one replaces."""
        if before is not None:
            self._epochs = dict(before._epochs)
            never = float("-inf")
            self._entries = {subject: Engine(engine.info, never, 0.0) for subject, engine in before._entries.items()}
        await self._nc.subscribe(f"{subjects.REGISTRY_PREFIX}.*.*", cb=self._on_put)
        await self.refresh()
        self._link.on_reconnect.append(self.refresh)

    async def refresh(self) -> None:
        """Reads from the bucket what no put has told yet. Where that is not allowed, the puts have to do."""
        if not self._bucket:
            return
        every = [f"{subjects.REGISTRY_PREFIX}.*.*"]
        since = self._link.up_since
        with contextlib.suppress(nats.errors.Error):
            async for subject, headers, payload in last_messages(self._nc, REGISTRY, every):
                known = self._entries.get(subject)
                if known is None or known.heard_at < since:  # a put is never older than the bucket
                    self._take(subject, headers, payload)

    async def _on_put(self, msg: Msg) -> None:
        self._take(msg.subject, msg.headers or {}, msg.data)

    def _take(self, subject: str, headers: dict[str, str], payload: bytes) -> None:
        if headers.get("KV-Operation") or headers.get("Nats-Marker-Reason"):
            self._entries.pop(subject, None)
            self._notify()
            return
        try:
            info = codec.decode(subject, headers, payload)
        except codec.DecodeError as error:
            self.dropped += 1
            log.debug("registry entry %s dropped: %s", subject, error)
            return
        assert isinstance(info, EngineInfo)
        known = self._epochs.get(subject)
        if known is not None and info.epoch < known:
            return  # a process that is being replaced spoke last
        self._epochs[subject] = info.epoch
        self._entries[subject] = Engine(info, asyncio.get_running_loop().time(), self._link.connected_s)
        self._notify()
        if known is not None and info.epoch > known:
            for listener in list(self.on_epoch):
                listener(info)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def live(self) -> list[EngineInfo]:
        """Ranks heard of within the TTL on a standing link, by instance and rank."""
        now = self._link.connected_s
        self._entries = {k: e for k, e in self._entries.items() if now - e.heard_s <= REGISTRY_TTL_S}
        return sorted((e.info for e in self._entries.values()), key=lambda i: (i.instance, i.rank))

    def storage_ranks(self, instance: str | None = None, domain: str | None = None) -> list[EngineInfo]:
        """The live ranks that answer commands, of an instance and of a domain where given."""
        return [
            info
            for info in self.live()
            if info.role == Role.STORAGE
            and (instance is None or subjects.stands_for(instance, subjects.token(info.instance)))
            and (domain is None or info.domain == domain)
        ]

    async def settled(self, instance: str | None = None, domain: str | None = None) -> list[EngineInfo]:
        """The storage ranks, once all of them are known or one heartbeat period has passed since the (re)connect.

        While the connection is down nothing is judged: BusUnavailableError if that lasts longer than `DOWN_S`.
        """
        loop = asyncio.get_running_loop()
        patience = loop.time() + DOWN_S
        while True:
            if not self._link.up:
                if loop.time() > patience:
                    raise BusUnavailableError(f"NATS has been away for more than {DOWN_S:g} s; it is tried on and on")
                await asyncio.sleep(0.02)
                continue
            changed = self._changed
            ranks = self.storage_ranks(instance, domain)
            if ranks and self._complete(ranks):
                return ranks
            left = self._link.up_since + GRACE_S - loop.time()
            if left <= 0:
                if not ranks:  # before anything is called absent, one look at the bucket itself
                    await self.refresh()
                return self.storage_ranks(instance, domain)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    def _complete(self, ranks: list[EngineInfo]) -> bool:
        """Whether every rank of each instance has been heard of since the (re)connect."""
        for instance in {info.instance for info in ranks}:
            mine = [info for info in self.live() if info.instance == instance]
            fresh = {
                info.rank
                for info in mine
                if self._entries[subjects.registry(info.instance, info.rank)].heard_at >= self._link.up_since
            }
            if len(fresh) < mine[0].world_size:
                return False
        return True
