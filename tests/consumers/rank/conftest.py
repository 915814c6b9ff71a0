# SPDX-License-Identifier: Apache-2.0
"""Ranks on a real nats-server, with a stand-in for their storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from semkv.bus import KV, connect
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.tracing import NullTracer
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN

MakeRank = Callable[..., RankWorker]


@pytest.fixture
def make_rank(nats_server: EmbeddedServer) -> Iterator[MakeRank]:
    """Starts ranks that read their commands, and stops them in the end."""
    workers: list[RankWorker] = []

    def make(
        ops: StandInStorage,
        instance: str = "engine-0",
        rank: int = 0,
        world_size: int = 1,
        *,
        url: str | None = None,
        domain: object = DOMAIN,
        role: Role = Role.STORAGE,
        threads: int = 4,
        tracer: NullTracer | None = None,
        wait: bool = True,
        epoch: int | None = None,
    ) -> RankWorker:
        extra = {} if epoch is None else {"epoch": epoch}
        who = RankIdentity(instance, rank, world_size, role, domain, **extra)  # type: ignore[arg-type]
        worker = RankWorker(BusSettings(url=url or nats_server.url), who, ops, threads=threads, tracer=tracer)
        worker.start()
        workers.append(worker)
        if wait and role == Role.STORAGE:
            assert worker.wait_ready(30)
        return worker

    yield make
    for worker in workers:
        worker.stop(5)


async def until_live(kv: KV, count: int) -> None:
    """Waits until the client sees this many ranks."""
    while len(await kv.engines()) != count:  # noqa: ASYNC110 - the registry is polled as a user would
        await asyncio.sleep(0.02)


@pytest.fixture
async def kv(nats_server: EmbeddedServer) -> AsyncIterator[KV]:
    async with connect(nats_server.url) as client:
        yield client
