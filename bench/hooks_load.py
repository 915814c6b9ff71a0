# SPDX-License-Identifier: Apache-2.0
"""Thousands of short requests through real engines: what semkv, a missing NATS and tracing cost in throughput.

Four real vLLM servers with LMCache, serving in turns: one without semkv's hooks, one hooked, its twin, and one hooked
with tracing on and 10 % of traces sampled. A round sends a block of requests in each condition, in shuffled order.
`nats up` comes twice, so that its ratio to itself shows the noise of one server; the twin's shows that between two
servers alike, which is what tracing has to be seen through. Beside throughput: the processor time of the server's own
processes for a request, which whatever else runs on the machine disturbs less. Ratios are within rounds: the median
over rounds, and its quartiles. What the hooked engine published is counted at the end: the gaps in `seq` must be what
it says it dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = 8
BLOCK = 120
WARM = 100
RING = 80
SAMPLED = "0.1"
SETTLE_S = 2.0
BASE = "nats up"
TICKS = os.sysconf("SC_CLK_TCK")


class Block(NamedTuple):
    """What a block of requests took: requests a second, and milliseconds of the server's processor time for each."""

    rate: float
    cpu_ms: float


def _servers(folder: Path, hooked_url: str, twin_url: str, traced_url: str) -> dict[str, Any]:
    """The four servers, not started."""
    from semkv.cli.devengine.lmcache_config import LMCacheConfig
    from semkv.cli.devengine.model import TINY, make_model
    from tests.support.vllm_server import tiny_server

    model = make_model(folder / "model", TINY)
    named = {
        "kv_connector": "SemKVConnectorV1",
        "kv_connector_module_path": "semkv.engine_hooks.connector",
        "kv_role": "kv_both",
        "engine_id": "plain",
    }
    tracing = {
        "SEMKV_TRACE_FILE": str(folder / "trace.json"),
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": SAMPLED,
    }
    options: dict[str, dict[str, Any]] = {
        # LMCache needs semkv's device connector to run on a CPU: it is named, and with no NATS told nothing is hooked.
        "plain": {"nats_url": None, "arguments": ["--kv-transfer-config", json.dumps(named)]},
        "hooked": {"nats_url": hooked_url, "environment": {"SEMKV_EVENT_RING": str(RING)}},
        "twin": {"nats_url": twin_url, "environment": {"SEMKV_EVENT_RING": str(RING)}},
        "traced": {"nats_url": traced_url, "environment": tracing},
    }
    servers = {}
    for name, chosen in options.items():
        lmcache = LMCacheConfig(disk=folder / name / "disk", settings={"local_disk": None, "max_local_disk_size": 0.0})
        servers[name] = tiny_server(
            folder / name, chosen.pop("nats_url"), lmcache=lmcache, model=model, max_num_seqs=8, **chosen
        )
    return servers


def _processor_ms(server: Any) -> float:
    """Processor time of the server's processes so far, in milliseconds."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # one that has just ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == server.pid:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks * 1000 / TICKS


def _ratios(taken: dict[str, list[Block]]) -> dict[str, float]:
    """For each condition its throughput and its processor time over those of the base, round by round."""
    figures: dict[str, float] = {}
    print(f"  {'':16} requests/s, ratio to '{BASE}': median (quartiles); ms of processor time for each, ratio")
    for name, blocks in taken.items():
        key = name.replace(" ", "_").replace("%", "percent")
        line = f"  {name:16}"
        for field, unit in (("rate", "per_s"), ("cpu_ms", "cpu_ms")):
            values = [getattr(block, field) for block in blocks]
            ratios = [one / getattr(base, field) for one, base in zip(values, taken[BASE], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            line += f" {statistics.median(values):8.2f}   {middle:.3f} ({low:.3f} to {high:.3f})  "
            kind = "ratio" if field == "rate" else "cpu_ratio"
            figures[f"{key}_{unit}"] = statistics.median(values)
            figures |= {f"{key}_{kind}": middle, f"{key}_{kind}_low": low, f"{key}_{kind}_high": high}
        print(line)
    return figures


def _events(url: str, total: int, log: str) -> dict[str, float]:
    """What arrived of `total` requests, and whether what is missing is what was dropped."""
    from tests.engine_hooks.capture import stored_events

    deadline, seqs = time.monotonic() + 30, set[int]()
    while total not in seqs and time.monotonic() < deadline:
        seqs = {event.seq for event in stored_events(url)}
    dropped = sum(map(int, re.findall(r"semkv: (\d+) finished events were dropped", log)))
    missing = len(set(range(1, total + 1)) - seqs)
    print(f"  {total} requests, {len(seqs)} events stored, {missing} missing, {dropped} said to be dropped")
    return {"requests": total, "events": len(seqs), "events_missing": missing, "events_dropped": dropped}


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    from semkv.bus.embedded import EmbeddedServer
    from tests.engine_hooks.test_load import flapping, resident_mib, send

    with tempfile.TemporaryDirectory(prefix="semkv-load-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        nats = stack.enter_context(EmbeddedServer(folder / "nats"))
        twin = stack.enter_context(EmbeddedServer(folder / "twin"))
        other = stack.enter_context(EmbeddedServer(folder / "other"))
        servers = _servers(folder, nats.url, twin.url, other.url)
        for server in servers.values():
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.start(), servers.values()))
        sent = dict.fromkeys(servers, 0)

        def block(engine: str, count: int = BLOCK) -> Block:
            # As long a prompt for each server.
            kind = f"{engine:6} {sent[engine]:6}"
            sent[engine] += count
            before = _processor_ms(servers[engine])
            rate = send(servers[engine], count, kind)
            return Block(rate, (_processor_ms(servers[engine]) - before) / count)

        def down() -> Block:
            nats.stop()
            try:
                return block("hooked")
            finally:
                nats.start()

        conditions: dict[str, Callable[[], Block]] = {
            BASE: lambda: block("hooked"),
            "nats up again": lambda: block("hooked"),
            "nats down": down,
            "nats flapping": lambda: flapping(nats, lambda: block("hooked")),
            "its twin": lambda: block("twin"),
            "without semkv": lambda: block("plain"),
            "tracing 10 %": lambda: block("traced"),
        }
        taken: dict[str, list[Block]] = {condition: [] for condition in conditions}
        order, source = list(conditions), random.Random(1)
        for engine in servers:
            block(engine, WARM)
        memory = {engine: resident_mib(server) for engine, server in servers.items()}
        for _ in range(ROUNDS):
            source.shuffle(order)
            for condition in order:
                taken[condition].append(conditions[condition]())
                time.sleep(SETTLE_S)
        figures = _ratios(taken)
        for engine, server in servers.items():
            figures[f"{engine}_mib_before"], figures[f"{engine}_mib_after"] = memory[engine], resident_mib(server)
            print(f"  {engine:16} {memory[engine]:.0f} MiB before, {figures[f'{engine}_mib_after']:.0f} after")
        return figures | _events(nats.url, sent["hooked"], servers["hooked"].log())
