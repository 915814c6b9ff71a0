# SPDX-License-Identifier: Apache-2.0
"""More than one server in SEMKV_NATS_URL: any of them will do, and which one it is stays known."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv.bus.connection import MIN_SERVER, check_version, connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings


@pytest.mark.parametrize("down", [None, 0, 1])
async def test_one_that_runs_is_found_and_its_version_known(tmp_path: Path, down: int | None) -> None:
    servers = [EmbeddedServer(tmp_path / str(number)).start() for number in range(2)]
    try:
        if down is not None:
            servers[down].stop()
        nc = await connect_nats(BusSettings(url=",".join(server.url for server in servers)), name="test")
        try:
            version = nc.connected_server_version
            assert (version.major, version.minor) >= MIN_SERVER
            check_version(nc)
            assert {f"nats://{url.netloc}" for url in nc.servers} == {server.url for server in servers}
        finally:
            await nc.close()
    finally:
        for server in servers:
            server.stop()
