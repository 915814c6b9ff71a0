# SPDX-License-Identifier: Apache-2.0
"""A real server with a rank on it, its storage a stand-in, and the commands run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN

Run = Callable[..., subprocess.CompletedProcess[str]]
MAIN = (sys.executable, "-c", "from semkv.cli.app import main; main()")


@dataclass
class Bus:
    """A server and one live rank."""

    server: EmbeddedServer
    storage: StandInStorage

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture
def bus(nats_server: EmbeddedServer) -> Iterator[Bus]:
    storage = StandInStorage(disk=range(1, 9))
    who = RankIdentity("engine-0", 0, 1, Role.STORAGE, DOMAIN)
    worker = RankWorker(BusSettings(url=nats_server.url), who, storage).start()
    assert worker.wait_ready(30)
    yield Bus(nats_server, storage)
    worker.stop(5)


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SEMKV_", "VLLM_", "OTEL_"))}
    return {**kept, "PYTHONHASHSEED": "0", "NO_COLOR": "1", **variables}


@pytest.fixture
def semkv(tmp_path: Path) -> Run:
    """`semkv ARGUMENTS…` in a process of its own."""

    def run(
        *arguments: object, code: int = 0, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        command = [*MAIN, *(str(argument) for argument in arguments)]
        done = subprocess.run(
            command, env=environment(**variables), cwd=tmp_path, capture_output=True, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run
