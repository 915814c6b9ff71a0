# SPDX-License-Identifier: Apache-2.0
"""One connection of a client and what hangs on it: the results inbox, the registry, and publishing commands.

A session lives as long as nats-py's connection, through any number of reconnects; the client opens a new one should
nats-py ever give up. Commands are published with an acknowledgement and, on doubt, again under the same id, which the
server recognises. One event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from semkv.bus import codec, subjects
from semkv.bus.connection import Link, check_size, close_nats, connect_nats
from semkv.bus.errors import BusError, BusUnavailableError, NoEngineError, NoJetStreamError
from semkv.bus.messages import Accepted, Command, Result
from semkv.bus.registry import EngineRegistry
from semkv.bus.settings import BusSettings
from semkv.bus.streams import AGENT, RESULTS, ensure_streams, last_messages

log = logging.getLogger(__name__)

_ACK_S = 2.0
_SERVICE_UNAVAILABLE = 503
_FILTERS_AT_ONCE = 100
_NO_STREAM = "there is no stream for commands"

Take = Callable[[Accepted | Result], None]


class Session:
    """`nc` and `link` are for readers that share the connection."""

    def __init__(self, settings: BusSettings, client: str, take: Take) -> None:
        self._settings = settings
        self._client = client
        self._take = take
        self.nc: Client
        self.link = Link()
        self.registry: EngineRegistry
        self.dropped = 0
        """Answers that could not be read."""

    async def open(self, timeout: float | None, before: Session | None = None) -> None:
        """Connects, makes the streams of this side where absent, and starts listening.

        `before` is the session that this one replaces: the ranks it knew are known.
        """
        self.nc = await connect_nats(self._settings, name=self._client, link=self.link, timeout=timeout)
        try:
            await self._require_jetstream()
            await self.ensure()
            tenant, client = subjects.token(self._settings.tenant), subjects.token(self._client)
            await self.nc.subscribe(f"{subjects.PREFIX}.{tenant}.*.res.{client}.>", cb=self._on_answer)
            self.registry = EngineRegistry(self.nc, self.link, bucket=not self._settings.accounts)
            await self.registry.start(before.registry if before is not None else None)
            await self.nc.flush()
        except BaseException:
            await close_nats(self.nc)
            raise
        self.link.on_reconnect.append(self.ensure)

    async def _require_jetstream(self) -> None:
        subject = f"$JS.API.STREAM.INFO.{RESULTS}"
        try:
            reply: Msg = await self.link.guard(subject, self.nc.request(subject, b"", timeout=_ACK_S))
            missing = json.loads(reply.data).get("error", {}).get("code") == _SERVICE_UNAVAILABLE
        except nats.errors.NoRespondersError:
            missing = True
        except (nats.errors.Error, asyncio.TimeoutError, BusError, ValueError):
            missing = False  # not asked, or not told: what needs it will say so
        if missing:
            raise NoJetStreamError(
                f"the server at {self._settings.shown_url} runs without JetStream: start it with -js, or add "
                "`jetstream {}` to its configuration"
            )

    async def ensure(self) -> None:
        """Makes this side's streams where absent and where allowed."""
        try:
            await ensure_streams(self.nc, self._settings, AGENT, link=self.link)
        except (nats.errors.Error, asyncio.TimeoutError, BusError) as error:
            # An observer may not make streams, and need not where they exist.
            log.debug("streams not checked: %s", error)

    async def close(self) -> None:
        await close_nats(self.nc)

    async def _on_answer(self, msg: Msg) -> None:
        self._read(msg.subject, dict(msg.headers or {}), msg.data)

    def _read(self, subject: str, headers: dict[str, str], payload: bytes) -> None:
        try:
            answer = codec.decode(subject, headers, payload)
        except codec.DecodeError as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("an answer was dropped (further ones are only counted): %s", str(error)[:300])
            return
        if isinstance(answer, (Accepted, Result)):
            self._take(answer)

    async def fetch(self, command_ids: Sequence[str]) -> None:
        """Reads the newest answers to these commands from the results stream."""
        tenant, client = subjects.token(self._settings.tenant), subjects.token(self._client)
        filters = [f"{subjects.PREFIX}.{tenant}.*.res.{client}.{command_id}.>" for command_id in command_ids]
        for start in range(0, len(filters), _FILTERS_AT_ONCE):
            batch = filters[start : start + _FILTERS_AT_ONCE]
            async for subject, headers, payload in last_messages(self.nc, RESULTS, batch):
                self._read(subject, headers, payload)

    async def publish(self, command: Command, headers: dict[str, str], *, timeout: float) -> bool:
        """Publishes a command until the stream has it. True if it had it before. Raises what is in `errors`."""
        subject = codec.subject_of(command)
        payload, own = codec.encode(command)
        headers = {**own, **headers}
        check_size(self.nc, payload, headers)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        trouble = "not connected"
        while True:
            left = deadline - loop.time()
            if left <= 0 and trouble == _NO_STREAM:
                raise NoEngineError(f"{trouble}, and no engine made it within {timeout:g} s: is one connected?")
            if left <= 0:
                raise BusUnavailableError(
                    f"{command.type} {command.command_id} was not acknowledged within {timeout:g} s ({trouble}); "
                    "it may still run: ask again with the same command_id"
                )
            if not self.link.up:
                await asyncio.sleep(min(0.02, left))
                continue
            try:
                wait = min(_ACK_S, left)
                reply: Msg = await self.link.guard(subject, self.nc.request(subject, payload, wait, headers=headers))
                return self._acknowledged(reply.data)
            except nats.errors.NoRespondersError:
                # Across accounts it is the engines that make it, perhaps a moment after a server lost its memory.
                trouble = _NO_STREAM
                if not self._settings.accounts:
                    await self.ensure()
            except (nats.errors.Error, asyncio.TimeoutError, OSError) as error:
                trouble = str(error) or type(error).__name__
            await asyncio.sleep(0.02)

    @staticmethod
    def _acknowledged(data: bytes) -> bool:
        try:
            ack: dict[str, Any] = json.loads(data)
        except ValueError:
            raise BusError(f"the server's acknowledgement cannot be read: {data[:80]!r}") from None
        if "error" in ack:
            raise BusError(f"the server refused the command: {ack['error'].get('description', ack['error'])}")
        return bool(ack.get("duplicate", False))
