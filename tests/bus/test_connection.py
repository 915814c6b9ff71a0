# SPDX-License-Identifier: Apache-2.0
"""One connection through a link that goes dead while much is being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client

from semkv.bus import connect, connection
from semkv.bus.connection import Link, connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from tests.bus.fault_proxy import FaultProxy


async def fill(nc: Client, until: Callable[[], bool]) -> int:
    """Publishes as long as it is not told to stop; how many bytes that was."""
    sent = 0
    while not until():
        try:
            await nc.publish("s", b"x" * 200_000)
            sent += 200_000
        except nats.errors.Error:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0)
    return sent


async def test_a_link_that_dies_full_of_data_is_left_and_another_made(nats_server: EmbeddedServer) -> None:
    """nats-py waits for the socket to take what is pending, and for the old one to close, without end."""
    link = Link()
    async with FaultProxy(nats_server.url) as proxy:
        nc = await connect_nats(BusSettings(url=proxy.url), name="x", link=link)
        proxy.stall()
        filling = asyncio.create_task(fill(nc, lambda: link.reconnects > 0))
        while link.up:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        proxy.heal()
        assert await filling > connection.PENDING_BYTES
        assert link.up
        await nc.flush()
        await nc.close()


async def test_a_client_on_a_dead_link_full_of_data_can_be_closed(nats_server: EmbeddedServer) -> None:
    async with FaultProxy(nats_server.url) as proxy:
        kv = await connect(proxy.url)
        nc = (await kv.session()).nc
        proxy.stall()
        filling = asyncio.create_task(fill(nc, lambda: nc.is_closed or not nc.is_connected))
        while nc.pending_data_size <= connection.PENDING_BYTES:  # noqa: ASYNC110 - now the publish waits
            await asyncio.sleep(0.01)
        await kv.close()
        await filling
        assert nc.is_closed
