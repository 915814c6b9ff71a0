# SPDX-License-Identifier: Apache-2.0
"""Thousands of short requests through a real engine with NATS up, down and flapping.

Every request succeeds, memory stays bounded, and what is missing in the events is exactly what the ring had to drop.
The throughput of each phase is printed and decides nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from semkv.bus.embedded import EmbeddedServer
from semkv.cli.devengine.server import VLLMServer
from tests.engine_hooks.capture import stored_events
from tests.support.vllm_server import tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
RING = 300
REQUESTS = 700
T = TypeVar("T")
TEXT = "the memory of an agent remembers what was said " * 3


def resident_mib(server: VLLMServer) -> float:
    """Resident memory of all the server's processes."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == server.pid:
                lines = (entry / "status").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024
        except (OSError, ValueError, IndexError):
            continue
    return total


def send(server: VLLMServer, count: int, kind: str) -> float:
    """Send `count` requests, eight at a time; requests per second. Every one must succeed."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(8) as pool:

        def one(number: int) -> int:
            body = {"model": "tiny", "prompt": f"{kind} {number} {TEXT}", "max_tokens": 1}
            return client.post(server.url + "/v1/completions", json=body).status_code

        begin = time.monotonic()
        assert set(pool.map(one, range(count))) == {200}
        return count / (time.monotonic() - begin)


def flapping(nats: EmbeddedServer, work: Callable[[], T]) -> T:
    stop = threading.Event()

    def flap() -> None:
        while not stop.wait(0.8):
            nats.stop()
            if not stop.wait(0.5):
                nats.start()

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        return work()
    finally:
        stop.set()
        thread.join()
        if nats.pid is None:
            nats.start()


def test_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("l")
    with EmbeddedServer(folder / "nats") as nats:
        server = tiny_server(folder / "engine", nats.url, max_num_seqs=8, environment={"SEMKV_EVENT_RING": str(RING)})
        try:
            server.start()
            send(server, 100, "warm")
            rates, memory = [("up", send(server, REQUESTS, "up"))], [resident_mib(server)]
            deadline = time.monotonic() + 60
            while len(stored_events(nats.url)) < 100 + REQUESTS:  # the last one comes after its answer
                assert time.monotonic() < deadline, "nothing is lost while NATS is up"
            nats.stop()
            rates.append(("down", send(server, REQUESTS, "down")))
            nats.start()
            rates.append(("flapping", flapping(nats, lambda: send(server, REQUESTS, "flapping"))))
            rates.append(("up again", send(server, REQUESTS, "again")))
            memory.append(resident_mib(server))
            print("requests/s:", ", ".join(f"{name} {rate:.0f}" for name, rate in rates), "MiB:", memory)

            total = 100 + 4 * REQUESTS
            deadline = time.monotonic() + 60
            seqs: set[int] = set()
            while total not in seqs and time.monotonic() < deadline:
                seqs = {event.seq for event in stored_events(nats.url)}
            assert max(seqs) == total, "each request has one seq, and no seq was given twice"
            missing = sorted(set(range(1, total + 1)) - seqs)
            said = re.findall(r"semkv: (\d+) finished events were dropped", server.log())
            assert len(missing) == sum(map(int, said)), "the gaps are what the engine says it dropped"
            assert len(missing) >= REQUESTS - RING - 256, "this test needs an overflow"
            assert not [seq for seq in missing if seq <= 100 + REQUESTS], "nothing is lost while NATS is up"
            assert not [seq for seq in missing if seq > 100 + 3 * REQUESTS]
            down = [seq for seq in missing if seq <= 100 + 2 * REQUESTS]
            assert down == list(range(down[0], down[0] + len(down))), "the oldest go, in one gap"
            assert memory[1] < memory[0] * 1.25 + 50
            assert not [line for line in server.log().splitlines() if "hook failed" in line]
        finally:
            server.stop()
