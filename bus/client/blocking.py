# SPDX-License-Identifier: Apache-2.0
"""The blocking twin of the client: the same names and arguments, for programs without an event loop.

    with connect_blocking("nats://127.0.0.1:4222") as kv:
        outcome = kv.prefetch(chunk_hashes).result(timeout=5)

An async client runs on a daemon thread of its own; every call may come from any thread and blocks only its caller. When
the client is closed, calls that still wait end with BusError, and so does every later one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from semkv.bus.client.connecting import connect
from semkv.bus.client.finished import FinishedStream
from semkv.bus.client.gaps import Gap
from semkv.bus.client.handle import CommandHandle, CommandResult, RankName
from semkv.bus.client.kv import KV
from semkv.bus.errors import BusError
from semkv.bus.messages import EngineInfo, Finished
from semkv.bus.settings import BusSettings
from semkv.bus.tasks import cancel_and_wait
from semkv.bus.tracing import NullTracer

T = TypeVar("T")

_CLOSE_S = 5.0


class _Loop:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="semkv-client", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._over = False

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise BusError("the blocking client cannot be used on its own thread; use the async one there")
        with self._lock:
            if self._over:
                work.close()
                raise BusError("this client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError:
            raise BusError("this client was closed while the call waited") from None
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        # A call that waits on another thread would wait for ever on a loop that stands still.
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending.result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        await cancel_and_wait(asyncio.all_tasks() - {asyncio.current_task()})


class BlockingHandle:
    """A command on its way."""

    def __init__(self, loop: _Loop, handle: CommandHandle) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def command_id(self) -> str:
        return self._handle.command_id

    @property
    def expected(self) -> tuple[RankName, ...]:
        return self._handle.expected

    @property
    def duplicate(self) -> bool:
        return self._handle.duplicate

    @property
    def done(self) -> bool:
        return self._handle.done

    def accepted(self, timeout: float | None = 5.0) -> tuple[RankName, ...]:
        """Waits until every expected rank has accepted; returns those that have."""
        return self._loop.call(self._handle.accepted(timeout))

    def result(self, timeout: float | None = 30.0) -> CommandResult:
        """Waits for the results; silent ranks are named."""
        return self._loop.call(self._handle.result(timeout))

    def cancel(self) -> BlockingHandle:
        """Stops the command between chunks."""
        return BlockingHandle(self._loop, self._loop.call(self._handle.cancel()))


class BlockingFinished:
    """An iterator of finished events; `close()` from any thread ends it."""

    def __init__(self, loop: _Loop, stream: FinishedStream) -> None:
        self._loop = loop
        self._stream = stream
        self._asking: asyncio.Task[Finished] | None = None

    @property
    def last_seq(self) -> int:
        return self._stream.last_seq

    @property
    def gaps(self) -> Sequence[Gap]:
        return tuple(self._stream.gaps)

    def __iter__(self) -> BlockingFinished:
        return self

    def __next__(self) -> Finished:
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def next(self, timeout: float | None = None) -> Finished | None:
        """The next event; None when the stream is over or nothing came in time (it then waits on for the next call)."""
        return self._loop.call(self._next(timeout))

    async def _next(self, timeout: float | None) -> Finished | None:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._stream.__anext__())
        await asyncio.wait({self._asking}, timeout=timeout)
        if not self._asking.done():
            return None
        task, self._asking = self._asking, None
        try:
            return task.result()
        except (StopAsyncIteration, asyncio.CancelledError):
            return None

    def close(self) -> None:
        """Ends the stream."""
        self._loop.call(self._close())

    async def _close(self) -> None:
        if self._asking is not None:
            await cancel_and_wait([self._asking])
        await self._stream.close()


class BlockingKV:
    """A connected client. Get one from `connect_blocking`."""

    def __init__(self, loop: _Loop, kv: KV) -> None:
        self._loop = loop
        self._kv = kv

    @property
    def tenant(self) -> str:
        return self._kv.tenant

    @property
    def client(self) -> str:
        return self._kv.client

    def prefetch(self, chunk_hashes: Sequence[int | str], **options: Any) -> BlockingHandle:
        """See `KV.prefetch`."""
        return self._run(self._kv.prefetch(chunk_hashes, **options))

    def evict(self, chunk_hashes: Sequence[int | str], **options: Any) -> BlockingHandle:
        """See `KV.evict`."""
        return self._run(self._kv.evict(chunk_hashes, **options))

    def retain(self, session: str, chunk_hashes: Sequence[int | str], **options: Any) -> BlockingHandle:
        """See `KV.retain`."""
        return self._run(self._kv.retain(session, chunk_hashes, **options))

    def release(self, session: str, **options: Any) -> BlockingHandle:
        """See `KV.release`."""
        return self._run(self._kv.release(session, **options))

    def locate(self, chunk_hashes: Sequence[int | str], **options: Any) -> BlockingHandle:
        """See `KV.locate`."""
        return self._run(self._kv.locate(chunk_hashes, **options))

    def cancel(self, target: BlockingHandle | str, **options: Any) -> BlockingHandle:
        """See `KV.cancel`."""
        if isinstance(target, BlockingHandle):
            return target.cancel()
        return self._run(self._kv.cancel(target, **options))

    def finished(self, session: str | None = None, **options: Any) -> BlockingFinished:
        """See `KV.finished`."""

        async def make() -> FinishedStream:
            return self._kv.finished(session, **options)

        return BlockingFinished(self._loop, self._loop.call(make()))

    def engines(self) -> list[EngineInfo]:
        """The live ranks."""
        return self._loop.call(self._kv.engines())

    def close(self) -> None:
        """Ends the client and its thread."""
        with contextlib.suppress(concurrent.futures.TimeoutError, BusError):
            self._loop.call(self._kv.close(), _CLOSE_S)
        self._loop.end()

    def __enter__(self) -> BlockingKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, CommandHandle]) -> BlockingHandle:
        return BlockingHandle(self._loop, self._loop.call(work))


def connect_blocking(
    url: str | None = None,
    *,
    tenant: str | None = None,
    client: str | None = None,
    creds: str | Path | None = None,
    settings: BusSettings | None = None,
    tracer: NullTracer | None = None,
    timeout: float = 10.0,
) -> BlockingKV:
    """Connects; the arguments are those of `connect`."""
    loop = _Loop()

    async def make() -> KV:
        kv: KV = await connect(
            url, tenant=tenant, client=client, creds=creds, settings=settings, tracer=tracer, timeout=timeout
        )
        return kv

    try:
        return BlockingKV(loop, loop.call(make()))
    except BaseException:
        loop.end()
        raise
