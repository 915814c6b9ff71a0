# SPDX-License-Identifier: Apache-2.0
"""Listens to everything semkv's engines publish, in a thread of its own, for tests that block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import nats.errors

from semkv.bus import codec
from semkv.bus.connection import connect_nats
from semkv.bus.messages.finished import Finished
from semkv.bus.messages.heartbeat import Heartbeat
from semkv.bus.settings import BusSettings


class Capture:
    """`with Capture(url) as seen:` then `seen.finished(...)`; `raw` has each message as (subject, headers, payload)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.raw: list[tuple[str, dict[str, str], bytes]] = []
        self.messages: list[Any] = []
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Capture:
        self._thread.start()
        assert self._ready.wait(20), "the capture did not connect"
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connection = await connect_nats(BusSettings(url=self._url), name="capture")

        async def take(message: Any) -> None:
            headers = dict(message.headers or {})
            self.raw.append((message.subject, headers, message.data))
            self.messages.append(codec.decode(message.subject, headers, message.data))

        await connection.subscribe("semkv.v1.*.*.evt.>", cb=take)
        await connection.flush()
        self._ready.set()
        await self._stop.wait()
        await connection.close()

    def events(self) -> list[Finished]:
        return [message for message in self.messages if isinstance(message, Finished)]

    def heartbeats(self) -> list[Heartbeat]:
        return [message for message in self.messages if isinstance(message, Heartbeat)]

    def finished(self, request_id: str, *, timeout: float = 15.0, count: int = 1) -> list[Finished]:
        """The events of one request; fails after `timeout` seconds without `count` of them."""
        return self.wait_for(lambda: [e for e in self.events() if e.request_id == request_id], count, timeout)

    def wait_for(self, find: Callable[[], list[Any]], count: int, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = find()
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{len(find())} of {count} messages came within {timeout} s; got {self.messages[-5:]}")


def stored_events(url: str) -> list[Finished]:
    """Every finished event that the events stream holds, in the stream's order."""

    async def read() -> list[Finished]:
        connection = await connect_nats(BusSettings(url=url), name="stored")
        try:
            subscription = await connection.jetstream().subscribe("semkv.v1.*.*.evt.*.finished", ordered_consumer=True)
            found: list[Finished] = []
            while True:
                try:
                    message = await subscription.next_msg(timeout=1.5)
                except (nats.errors.TimeoutError, asyncio.TimeoutError):
                    return found
                event = codec.decode(message.subject, dict(message.headers or {}), message.data)
                assert isinstance(event, Finished)
                found.append(event)
        finally:
            await connection.close()

    return asyncio.run(read())
