# SPDX-License-Identifier: Apache-2.0
"""What one command costs to write (validate and pack) and to read (unpack and validate), against one NATS hop.

The hop is half of a bare nats-py round trip of the same payload, measured between the other figures of the same run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import nats

from bench._ranks import run_fast
from semkv.bus import codec
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Prefetch

COUNTS = (10, 100, 1000, 4096)
ROUNDS = 60


def _command(hashes: tuple[int, ...]) -> Prefetch:
    return Prefetch(
        tenant="default", domain="0123456789ab", instance="all", command_id="c", client="bench", chunk_hashes=hashes
    )


async def _measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    async with EmbeddedServer() as server:
        here, there = await nats.connect(server.url), await nats.connect(server.url)

        async def echo(msg: Any) -> None:
            await there.publish(msg.reply, b"")

        await there.subscribe("echo", cb=echo)
        await there.flush()
        print(f"{'hashes':>7} {'bytes':>7} {'write us':>9} {'read us':>9} {'hop us':>8} {'write+read / hop':>17}")
        for count in COUNTS:
            hashes = tuple(range(-count // 2, count - count // 2))
            payload, headers = codec.encode(_command(hashes))
            subject = codec.subject_of(_command(hashes))
            write, read, hop = [], [], []
            for _ in range(ROUNDS):
                start = time.perf_counter_ns()
                codec.encode(_command(hashes))
                write.append(time.perf_counter_ns() - start)
                start = time.perf_counter_ns()
                codec.decode(subject, headers, payload)
                read.append(time.perf_counter_ns() - start)
                start = time.perf_counter_ns()
                await here.request("echo", payload, timeout=10)
                hop.append((time.perf_counter_ns() - start) / 2)
            w, r, h = (statistics.median(values) / 1000 for values in (write, read, hop))
            print(f"{count:>7} {len(payload):>7} {w:>9.1f} {r:>9.1f} {h:>8.1f} {(w + r) / h:>17.2f}")
            figures |= {f"write_us_{count}": w, f"read_us_{count}": r, f"share_of_hop_{count}": (w + r) / h}
        await here.close()
        await there.close()
    return figures


def run() -> dict[str, Any]:
    """Prints the table; the figures of interest are `share_of_hop_*`."""
    figures: dict[str, Any] = run_fast(_measure)
    return figures
