# SPDX-License-Identifier: Apache-2.0
"""Who is there, told by the registry alone: what an outage, a slow rank, a stopped rank and a new connection change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client

from semkv.bus import codec, registry
from semkv.bus.connection import Link, connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import EngineInfo
from semkv.bus.registry import Announcer, EngineRegistry
from semkv.bus.settings import BusSettings
from semkv.bus.streams import ensure_streams
from tests.bus.fault_proxy import FaultProxy
from tests.contracts.samples import SAMPLES

INFO = next(m for m in SAMPLES if isinstance(m, EngineInfo)).model_copy(update={"rank": 0, "world_size": 1})


@pytest.fixture
async def nc(nats_server: EmbeddedServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url)
    await ensure_streams(client, BusSettings(url=nats_server.url))
    yield client
    await client.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter clock."""
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(registry, "GRACE_S", 0.3)
    monkeypatch.setattr(registry, "REGISTRY_TTL_S", 1.5)


async def put(nc: Client, info: EngineInfo) -> None:
    payload, headers = codec.encode(info, json=True)
    await nc.request(codec.subject_of(info), payload, headers=headers, timeout=10)


async def follow(url: str, before: EngineRegistry | None = None) -> tuple[Client, Link, EngineRegistry]:
    link = Link()
    nc = await connect_nats(BusSettings(url=url), name="test", link=link)
    known = EngineRegistry(nc, link)
    await known.start(before)
    return nc, link, known


async def until_up(link: Link, reconnects: int = 1) -> None:
    while link.reconnects < reconnects:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_an_outage_longer_than_the_ttl_makes_nobody_absent(
    nats_server: EmbeddedServer, nc: Client, quick: None
) -> None:
    await put(nc, INFO)
    mine, link, known = await follow(nats_server.url)
    assert await known.settled() == [INFO]
    await asyncio.to_thread(nats_server.kill)
    await asyncio.sleep(2)
    await asyncio.to_thread(nats_server.start)
    await until_up(link)
    # The bucket is empty now, and the rank has not come back: it is too early to say that it will not.
    assert await known.settled() == [INFO]
    # Silent for the TTL on a standing link, it is gone.
    while known.live():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert await known.settled() == []
    await mine.close()


async def test_who_stopped_or_was_replaced_while_we_were_cut_off_is_seen_after_the_reconnect(
    nats_server: EmbeddedServer, nc: Client
) -> None:
    other = INFO.model_copy(update={"instance": "engine-1"})
    async with FaultProxy(nats_server.url) as proxy:
        for info in (INFO, other):
            await put(nc, info)
        mine, link, known = await follow(proxy.url)
        assert [info.instance for info in await known.settled()] == ["engine-0", "engine-1"]
        replaced: list[EngineInfo] = []
        known.on_epoch.append(replaced.append)
        proxy.cut()
        while link.up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await nc.request(codec.subject_of(INFO), b"", headers={"KV-Operation": "DEL"})
        new = other.model_copy(update={"epoch": other.epoch + 1})
        await put(nc, new)
        proxy.heal()
        await until_up(link)
        assert await known.settled() == [new]  # without waiting for either to say it again: neither will
        assert known.live() == [new]
        assert replaced == [new]
        await mine.close()


async def test_a_new_connection_knows_whom_the_old_one_knew(
    nats_server: EmbeddedServer, nc: Client, quick: None
) -> None:
    await put(nc, INFO)
    mine, _, known = await follow(nats_server.url)
    assert await known.settled() == [INFO]
    await mine.close()
    await nc.jetstream().purge_stream("KV_semkv_engines")
    again, _, anew = await follow(nats_server.url, before=known)
    assert await anew.settled() == [INFO]
    replaced: list[EngineInfo] = []
    anew.on_epoch.append(replaced.append)
    new = INFO.model_copy(update={"epoch": INFO.epoch + 1})
    await put(nc, new)
    while not replaced:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert replaced == [new]
    await again.close()


async def test_a_failed_announcement_is_tried_again_before_the_next_period(
    nats_server: EmbeddedServer, nc: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_S", 3600.0)
    link = Link()
    mine = await connect_nats(BusSettings(url=nats_server.url), name="rank", link=link)
    failures = 2

    async def ensure() -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("not yet")
        await ensure_streams(mine, BusSettings(url=nats_server.url))

    await nc.jetstream().delete_stream("KV_semkv_engines")
    announcer = Announcer(mine, link, lambda: INFO, ensure)
    announcer.start()
    await announcer.announced.wait()
    assert failures < 0
    await announcer.stop()
    await mine.close()
