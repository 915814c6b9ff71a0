# SPDX-License-Identifier: Apache-2.0
"""Fixtures every room uses: a real nats-server per test, ended by its own process id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv.bus.embedded import EmbeddedServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A running nats-server with JetStream, on a free port, with its data in the test's folder."""
    server = EmbeddedServer(store_dir=tmp_path / "nats")
    server.start()
    try:
        yield server
    finally:
        server.stop()
