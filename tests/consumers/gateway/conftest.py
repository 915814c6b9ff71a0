# SPDX-License-Identifier: Apache-2.0
"""A real nats-server, rank workers on a stand-in storage, and a real HTTP server in front of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import uvicorn

from semkv.bus.domain import HashDomain
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.gateway.main import server
from semkv.consumers.gateway.settings import GatewaySettings
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage

DOMAIN = HashDomain(
    model="tiny", revision="r0", chunk_size=64, save_unfull_chunk=False, kv_dtype="float32", world_size=1,
    layout="test", probe=42,
)  # fmt: skip


def domain_of(**fields: Any) -> HashDomain:
    """The domain with other fields (not by copy: a copy keeps the fingerprint that was worked out before)."""
    return HashDomain(**{**DOMAIN.model_dump(), **fields})


@pytest.fixture
def rank_of(nats_server: EmbeddedServer) -> Iterator[Callable[..., RankWorker]]:
    """Starts ranks; they end with the test."""
    workers: list[RankWorker] = []

    def start(
        storage: StandInStorage, *, instance: str = "e0", rank: int = 0, world_size: int = 1, **domain: Any
    ) -> RankWorker:
        who = RankIdentity(instance, rank, world_size, Role.STORAGE, domain_of(**domain))
        worker = RankWorker(BusSettings(url=nats_server.url), who, storage).start()
        workers.append(worker)
        assert worker.wait_ready(20)
        return worker

    yield start
    for worker in workers:
        worker.stop()


@dataclass
class Gateway:
    server: uvicorn.Server
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post(f"/memory/{path}", json=body, **more)


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """A gateway on a free port of loopback."""
    uv = server(replace(settings, port=0))
    uv.config.log_level = "warning"
    task = asyncio.create_task(uv.serve())
    while not uv.started:
        assert not task.done(), task
        await asyncio.sleep(0.01)
    port = uv.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            yield Gateway(uv, url, client)
    finally:
        uv.should_exit = True
        await task


@pytest.fixture
def settings(nats_server: EmbeddedServer) -> GatewaySettings:
    return GatewaySettings(bus=BusSettings(url=nats_server.url))


@pytest.fixture
async def gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    async with running(settings) as found:
        yield found
