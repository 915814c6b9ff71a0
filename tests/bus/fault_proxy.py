# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that breaks links: cut (connections reset, new ones refused), stall (bytes stand still), heal."""

from __future__ import annotations

import asyncio
import contextlib


class FaultProxy:
    """Between clients and one server. `url` is where clients connect."""

    def __init__(self, target_url: str) -> None:
        self._target_port = int(target_url.rpartition(":")[2])
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self._refuse = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection and refuses new ones."""
        self._refuse = True
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Nothing passes any more, and nobody is told: a dead link."""
        self._flow.clear()

    def heal(self) -> None:
        self._refuse = False
        self._flow.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuse:
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flow.wait()
                sink.write(data)
                await sink.drain()
        self._writers.discard(sink)
        sink.transport.abort()
