# SPDX-License-Identifier: Apache-2.0
"""Thousands of small commands through the gateway, beside the bus alone, in one run.

A locate of 16 chunks on a stand-in storage that answers at once, so that what is measured is the way there and back:
`KV.locate` with its result, and `POST /memory/locate` over HTTP with a connection kept and, as today's agents do it, a
connection per call. One at a time for latency, 32 at once for rate. The ratio to the bus is what counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx

from semkv.bus.client import connect
from semkv.bus.embedded import EmbeddedServer

SERIAL = int(os.environ.get("SEMKV_BENCH_COMMANDS", "2000"))
PARALLEL = 32
CHUNKS = 16

_RANK = """
import sys, time
from semkv.bus.domain import HashDomain
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
domain = HashDomain(model="m", revision="r", chunk_size=64, save_unfull_chunk=False, kv_dtype="float32", world_size=1,
                    layout="bench", probe=1)
worker = RankWorker(BusSettings(url=sys.argv[1]), RankIdentity("e0", 0, 1, Role.STORAGE, domain),
                    StandInStorage(disk=set(range(64)))).start()
worker.wait_ready(30)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _process(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


async def _time(one: Callable[[], Awaitable[None]]) -> dict[str, float]:
    for _ in range(50):
        await one()
    times = []
    for _ in range(SERIAL):
        began = time.perf_counter()
        await one()
        times.append((time.perf_counter() - began) * 1000)
    left = SERIAL

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(PARALLEL)))
    rate = SERIAL / (time.perf_counter() - began)
    cuts = statistics.quantiles(times, n=100)
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "per_s": rate}


@contextlib.asynccontextmanager
async def _ready(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/healthz")).json().get("engines"):
                    break
            await asyncio.sleep(0.05)
        yield client


async def _measure(nats_url: str, gateway_url: str) -> dict[str, dict[str, float]]:
    body = {"chunk_hashes": [f"{n:x}" for n in range(1, CHUNKS + 1)]}
    found = {}
    async with connect(nats_url) as kv, _ready(gateway_url) as client:

        async def by_bus() -> None:
            outcome = await (await kv.locate(range(1, CHUNKS + 1))).result(10)
            assert outcome.ok, outcome

        async def by_http() -> None:
            answer = await client.post("/memory/locate", json=body)
            assert answer.status_code == 200, answer.text

        async def by_new_connection() -> None:
            async with httpx.AsyncClient(base_url=gateway_url, trust_env=False, timeout=30, verify=False) as fresh:
                answer = await fresh.post("/memory/locate", json=body)
                assert answer.status_code == 200, answer.text

        found["bus"] = await _time(by_bus)
        found["gateway"] = await _time(by_http)
        found["gateway, new connection"] = await _time(by_new_connection)
    return found


def run() -> dict[str, float]:
    """The figures, by name."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(store_dir=Path(folder) / "nats") as nats:
        settings = {"SEMKV_NATS_URL": nats.url, "SEMKV_GATEWAY_PORT": "0"}
        port_file = Path(folder) / "port"
        serve = (
            "import asyncio, pathlib, sys\n"
            "from semkv.consumers.gateway.main import server\n"
            "from semkv.consumers.gateway.settings import GatewaySettings\n"
            "async def main():\n"
            "    uv = server(GatewaySettings.from_env()); task = asyncio.create_task(uv.serve())\n"
            "    while not uv.started: await asyncio.sleep(0.01)\n"
            "    pathlib.Path(sys.argv[1]).write_text(str(uv.servers[0].sockets[0].getsockname()[1]))\n"
            "    await task\n"
            "asyncio.run(main())\n"
        )
        # The settings above name port 0, which from_env reads as any free one.
        with _process("-c", _RANK, nats.url) as rank, _process("-c", serve, str(port_file), **settings):
            assert rank.stdout is not None
            rank.stdout.readline()
            while not port_file.exists() or not port_file.read_text():
                time.sleep(0.05)
            found = asyncio.run(_measure(nats.url, f"http://127.0.0.1:{port_file.read_text()}"))
    figures: dict[str, float] = {"commands": float(SERIAL)}
    print(f"{SERIAL} locates of {CHUNKS} chunks each")
    print(f"{'':<26}{'p50 ms':>9}{'p99 ms':>9}{'per s':>9}{'p50 ratio':>11}")
    for name, row in found.items():
        ratio = row["p50_ms"] / found["bus"]["p50_ms"]
        print(f"{name:<26}{row['p50_ms']:>9.2f}{row['p99_ms']:>9.2f}{row['per_s']:>9.0f}{ratio:>11.2f}")
        key = name.replace(", ", "_").replace(" ", "_")
        figures |= {f"{key}_{what}": value for what, value in row.items()}
        figures[f"{key}_p50_ratio_to_bus"] = ratio
    return figures


if __name__ == "__main__":
    run()
