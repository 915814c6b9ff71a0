# SPDX-License-Identifier: Apache-2.0
"""Reading a stream in order, without acknowledgements, through everything that can happen to the server.

`OrderedReader` iterates over a stream's messages from a time or a sequence on. It makes a short-lived push consumer
and makes it anew, from the next sequence, after a reconnect, a gap, missing heartbeats or its deletion; if the stream
itself was lost, it reads on by time. Each message comes once and in stream order. Iteration ends when the connection is
closed for good, and with PermissionDeniedError where the server does not allow it. The server is held back (flow
control) while the reader's user is slow, so memory stays bounded and nothing is lost. With `deliver` messages are not
iterated over: each is handed over as it arrives, without another turn of the loop, after `room` has let it pass; what
is denied is then tried on and on. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from semkv.bus import subjects
from semkv.bus.clock import BrokerClock, to_rfc3339
from semkv.bus.connection import Link
from semkv.bus.errors import PermissionDeniedError
from semkv.bus.streams import COMMANDS, stream_info
from semkv.bus.tasks import cancel_and_wait

log = logging.getLogger(__name__)

IDLE_HEARTBEAT_S = 1.0
_SILENCE_S = 3.0
_RETRY_S = 0.2
_RETRY_MAX_S = 2.0
_INACTIVE_S = 30.0

Ensure = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class StreamMessage:
    """One message of a stream: its subject, headers and payload, its sequence and the stream's timestamp (unix ns)."""

    subject: str
    headers: dict[str, str]
    data: bytes
    seq: int
    time_ns: int


def delivery(reply: str) -> tuple[int, int, int] | None:
    """(stream sequence, consumer sequence, timestamp ns) out of a delivered message's reply subject."""
    parts = reply.split(".")
    if parts[:2] != ["$JS", "ACK"] or len(parts) < 9:
        return None
    first = 5 if len(parts) == 9 else 7
    try:
        return int(parts[first]), int(parts[first + 1]), int(parts[first + 2])
    except (ValueError, IndexError):
        return None


def covering(patterns: Sequence[str]) -> str:
    """One subject pattern that matches whatever one of `patterns` does."""
    columns = [list(tokens) for tokens in zip(*(pattern.split(".") for pattern in patterns), strict=False)]
    joined: list[str] = []
    for tokens in columns:
        if ">" in tokens:
            return ".".join([*joined, ">"])
        joined.append(tokens[0] if len(set(tokens)) == 1 else "*")
    if len({pattern.count(".") for pattern in patterns}) > 1:
        joined[-1] = ">"
    return ".".join(joined)


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern with NATS's wildcards."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(given) == len(wanted)


class OrderedReader:
    """`async with OrderedReader(...) as reader: async for message in reader: ...`"""

    def __init__(
        self,
        nc: Client,
        link: Link,
        stream: str,
        filters: Sequence[str],
        *,
        start_time_ns: int | None = None,
        start_seq: int | None = None,
        ensure: Ensure | None = None,
        clock: BrokerClock | None = None,
        deliver: Callable[[StreamMessage], None] | None = None,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Without start: what is published from now on. `ensure` makes the stream where it is absent.

        `start_time_ns` is the broker's time, or with `clock` our own, which is converted once the clock is measured.
        """
        self._nc = nc
        self._link = link
        self._stream = stream
        self._filters = list(filters)
        self._start_time_ns = start_time_ns
        self._next_seq = start_seq
        self._ensure = ensure
        self._clock = clock
        self._deliver = deliver
        self._room = room
        self._arrived: asyncio.Queue[StreamMessage | str | None] = asyncio.Queue()
        self._renew = asyncio.Event()
        self._sub: Subscription | None = None
        self._consumer = ""
        self._consumer_seq = 0
        self._denied: PermissionDeniedError | None = None
        self._covered = False
        """The consumer delivers more than was asked for."""
        self._created = ""
        self._complained = ""
        self._last_time_ns: int | None = None
        self._last_activity = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ender: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.renewals = 0
        """How often the consumer had to be made again."""

    async def __aenter__(self) -> OrderedReader:
        self._link.on_reconnect.append(self._renew.set)
        self._task = asyncio.create_task(self._keep())
        self._ender = asyncio.create_task(self._end_with_connection())
        return self

    async def _end_with_connection(self) -> None:
        await self._link.closed.wait()
        self._arrived.put_nowait(None)

    async def ended(self) -> None:
        """Waits until the connection is over for good."""
        await self._link.closed.wait()

    async def ready(self) -> None:
        """Waits until a consumer exists: what is published from here on will be read."""
        await self._ready.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ValueError):
            self._link.on_reconnect.remove(self._renew.set)
        await cancel_and_wait(task for task in (self._task, self._ender) if task is not None)
        await self._drop_consumer(delete=True)
        self._arrived.put_nowait(None)

    def __aiter__(self) -> OrderedReader:
        return self

    async def __anext__(self) -> StreamMessage:
        while True:
            item = await self._arrived.get()
            if item is None:
                if self._denied is not None:
                    raise self._denied
                raise StopAsyncIteration
            if isinstance(item, StreamMessage):
                return item
            await self._answer(item)  # all before it has been taken: let the server go on

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._renew.clear()
            self._ready.clear()
            await self._make_until_it_works()
            if self._denied is not None:
                return
            self._ready.set()
            while not self._renew.is_set():
                silent_for = loop.time() - self._last_activity
                if silent_for > _SILENCE_S and self._nc.is_connected:
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._renew.wait(), max(0.1, _SILENCE_S - silent_for))
            self.renewals += 1

    async def _make_until_it_works(self) -> None:
        wait = _RETRY_S
        while True:
            if self._nc.is_connected:
                try:
                    await self._make_consumer()
                    return
                except nats.js.errors.NotFoundError:
                    await self._try_ensure()
                except PermissionDeniedError as error:
                    if self._deliver is None:
                        self._denied = error
                        self._arrived.put_nowait(None)
                        return
                    if str(error) != self._complained:
                        self._complained = str(error)
                        log.error("%s cannot be read until this is mended: %s", self._stream, error)
                except (nats.errors.Error, asyncio.TimeoutError, OSError, ValueError) as error:
                    log.debug("reading %s: %s; trying again", self._stream, error)
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, _RETRY_MAX_S)

    async def _try_ensure(self) -> None:
        if self._ensure is None:
            return
        try:
            await self._ensure()
        except Exception as error:  # whatever it is, the next round tries again
            log.debug("making %s: %s; trying again", self._stream, error)

    async def _make_consumer(self) -> None:
        await self._drop_consumer(delete=True)
        asking = stream_info(self._nc, self._stream, self._clock)
        info = await self._link.guard(f"$JS.API.STREAM.INFO.{self._stream}", asking)
        created, last_seq = str(info["created"]), int(info["state"]["last_seq"])
        made_anew = self._created not in ("", created)
        if made_anew or (self._next_seq is not None and self._next_seq > last_seq + 1):
            log.warning("stream %s was made anew or lost its tail: reading on by time", self._stream)
            self._next_seq = None
        self._created = created
        if self._next_seq is None and self._last_time_ns is None and self._start_time_ns is None:
            self._next_seq = last_seq + 1
        inbox = self._nc.new_inbox()
        self._consumer_seq = 0
        self._last_activity = asyncio.get_running_loop().time()
        self._sub = await self._nc.subscribe(inbox, cb=self._receiver(inbox))
        config = ConsumerConfig(
            deliver_subject=inbox,
            filter_subjects=self._filters,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            ack_wait=22 * 3600.0,
            idle_heartbeat=IDLE_HEARTBEAT_S,
            flow_control=True,
            inactive_threshold=_INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
        )
        self._covered = self._next_seq is None and len(self._filters) > 1
        if self._next_seq is not None:
            config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = self._next_seq
        else:
            # nats-server 2.15.1 skips messages when a start by time meets several filters (a start by sequence does
            # not): the consumer gets one filter that covers them, and `_receiver` leaves out the rest.
            config.filter_subjects = [covering(self._filters)]
            config.deliver_policy = DeliverPolicy.BY_START_TIME
            config.opt_start_time = to_rfc3339(self._from_ns())
        making = self._nc.jetstream().add_consumer(self._stream, config=config)
        made = await self._link.guard(f"$JS.API.CONSUMER.CREATE.{self._stream}", making)
        self._consumer = made.name

    def _from_ns(self) -> int:
        """The broker's time to read from: after what was read last, else the start."""
        if self._last_time_ns is not None:
            return self._last_time_ns + 1
        start = self._start_time_ns or 0
        # Rather a message from just before the start than one too few.
        return start if self._clock is None else start + self._clock.offset_ns - self._clock.uncertain_ns

    def _receiver(self, inbox: str) -> Callable[[Msg], Awaitable[None]]:
        async def receive(msg: Msg) -> None:
            if self._sub is None or self._sub.subject != inbox:
                return  # of a consumer already given up
            self._last_activity = asyncio.get_running_loop().time()
            headers = msg.headers or {}
            if not msg.data and headers.get("Status") == "100":
                await self._on_control(msg, headers)
                return
            where = delivery(msg.reply)
            if where is None:
                return
            stream_seq, consumer_seq, time_ns = where
            if consumer_seq != self._consumer_seq + 1:
                self._renew.set()  # something was lost: read again from the next sequence
                return
            if self._room is not None:
                await self._room()  # may be cancelled: nothing is counted as read before
            self._consumer_seq = consumer_seq
            if self._next_seq is not None and stream_seq < self._next_seq:
                return
            self._next_seq, self._last_time_ns = stream_seq + 1, time_ns
            if self._covered and not any(matches(pattern, msg.subject) for pattern in self._filters):
                return
            message = StreamMessage(msg.subject, headers, msg.data, stream_seq, time_ns)
            if self._deliver is not None:
                self._deliver(message)
            else:
                self._arrived.put_nowait(message)

        return receive

    async def _on_control(self, msg: Msg, headers: dict[str, str]) -> None:
        if msg.reply:
            await self._held_back(msg.reply)
            return
        last = headers.get("Nats-Last-Consumer", "")
        if last.isdigit() and int(last) > self._consumer_seq:
            self._renew.set()
        stalled = headers.get("Nats-Consumer-Stalled", "")
        if stalled and self._arrived.empty():
            await self._held_back(stalled)

    async def _held_back(self, reply: str) -> None:
        """Flow control: answered once all that came before it was taken."""
        if self._deliver is None:
            self._arrived.put_nowait(reply)
        else:
            await self._answer(reply)

    async def _answer(self, reply: str) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._nc.publish(reply, b"")

    async def _drop_consumer(self, *, delete: bool) -> None:
        sub, self._sub = self._sub, None
        name, self._consumer = self._consumer, ""
        if self._nc.is_closed:
            return
        if sub is not None:
            with contextlib.suppress(nats.errors.Error):
                await sub.unsubscribe()
        if delete and name and self._nc.is_connected:
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
                await self._nc.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"")


class CommandReader(OrderedReader):
    """The commands a rank has to read: those for its instance in any domain, and those for all of its own domain."""

    def __init__(
        self,
        nc: Client,
        link: Link,
        instance: str,
        domain: str,
        *,
        start_time_ns: int,
        start_seq: int | None = None,
        ensure: Ensure | None = None,
        clock: BrokerClock | None = None,
        deliver: Callable[[StreamMessage], None] | None = None,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        filters = [
            f"{subjects.PREFIX}.*.*.cmd.{subjects.token(instance)}.>",
            f"{subjects.PREFIX}.*.{domain}.cmd.{subjects.ALL}.>",
        ]
        super().__init__(
            nc, link, COMMANDS, filters, start_time_ns=start_time_ns, start_seq=start_seq, ensure=ensure, clock=clock,
            deliver=deliver, room=room,
        )  # fmt: skip
