# SPDX-License-Identifier: Apache-2.0
"""What a message costs to write (validate and pack) and to read (unpack and validate), against one NATS hop.

A command, its result and a finished event, each about the same number of chunks.

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
from semkv.bus.messages import Finished, Prefetch, Result
from semkv.bus.messages.base import Message
from semkv.bus.status import ChunkStatus, HashesStatus, State

COUNTS = (10, 100, 1000, 4096)
ROUNDS = 60


WHERE = {"tenant": "default", "domain": "0123456789ab", "instance": "bench"}
ASKED = {**WHERE, "command_id": "0197a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b", "client": "bench"}


def _prefetch(hashes: tuple[int, ...]) -> Message:
    return Prefetch(**ASKED, chunk_hashes=hashes)


def _result(hashes: tuple[int, ...]) -> Message:
    return Result(
        **ASKED, op="prefetch", rank=0, world_size=1, epoch=1, state=State.SUCCEEDED,
        chunk_status=(ChunkStatus.LOADED,) * len(hashes), counts={"loaded": len(hashes)}, bytes_by_tier={"cpu": 1},
        usable_prefix=len(hashes), queued_ms=0.5, ran_ms=5.0,
    )  # fmt: skip


def _finished(hashes: tuple[int, ...]) -> Message:
    return Finished(
        **WHERE, epoch=1, seq=1, request_id="r", engine_request_id="r-0", finish_reason="stop",
        hashes_status=HashesStatus.KNOWN, chunk_hashes=hashes, chunk_size=256, prompt_tokens=len(hashes) * 256,
        generated_tokens=10, arrived_at=1, finished_at=2,
    )  # fmt: skip


TYPES = {"prefetch": _prefetch, "result": _result, "finished": _finished}


async def _measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    async with EmbeddedServer() as server:
        here, there = await nats.connect(server.url), await nats.connect(server.url)

        async def echo(msg: Any) -> None:
            await there.publish(msg.reply, b"")

        await there.subscribe("echo", cb=echo)
        await there.flush()
        print(
            f"{'':>10} {'hashes':>7} {'bytes':>7} {'write us':>9} {'read us':>9} {'hop us':>8} {'write+read / hop':>17}"
        )
        for name, make in TYPES.items():
            for count in COUNTS:
                hashes = tuple(range(-count // 2, count - count // 2))
                payload, headers = codec.encode(make(hashes))
                subject = codec.subject_of(make(hashes))
                write, read, hop = [], [], []
                for _ in range(ROUNDS):
                    start = time.perf_counter_ns()
                    codec.encode(make(hashes))
                    write.append(time.perf_counter_ns() - start)
                    start = time.perf_counter_ns()
                    codec.decode(subject, headers, payload)
                    read.append(time.perf_counter_ns() - start)
                    start = time.perf_counter_ns()
                    await here.request("echo", payload, timeout=10)
                    hop.append((time.perf_counter_ns() - start) / 2)
                w, r, h = (statistics.median(values) / 1000 for values in (write, read, hop))
                share = (w + r) / h
                print(f"{name:>10} {count:>7} {len(payload):>7} {w:>9.1f} {r:>9.1f} {h:>8.1f} {share:>17.2f}")
                key = f"{name}_{count}"
                figures |= {f"write_us_{key}": w, f"read_us_{key}": r, f"share_of_hop_{key}": share}
        await here.close()
        await there.close()
    return figures


def run() -> dict[str, Any]:
    """Prints the table; the figures of interest are `share_of_hop_*`."""
    figures: dict[str, Any] = run_fast(_measure)
    return figures
