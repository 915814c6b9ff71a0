# SPDX-License-Identifier: Apache-2.0
"""How many finished events a second one process writes and publishes, all of them stored, and one reader follows.

Against the same number of bare publishes of the same bytes in the same run.
"""

from __future__ import annotations

import time
from typing import Any

import nats

from bench._ranks import run_fast
from semkv.bus import codec, connect
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished
from semkv.bus.settings import BusSettings
from semkv.bus.status import HashesStatus
from semkv.bus.streams import EVENTS, ensure_streams, stream_info

EVENTS_SENT = 20_000
HASHES = tuple(range(32))


def _event(seq: int) -> Finished:
    return Finished(
        tenant="default", domain="0123456789ab", instance="bench", epoch=1, seq=seq, request_id=f"r{seq}",
        engine_request_id=f"r{seq}-0", finish_reason="stop", hashes_status=HashesStatus.KNOWN, chunk_hashes=HASHES,
        chunk_size=256, prompt_tokens=8192, generated_tokens=10, arrived_at=1, finished_at=2,
    )  # fmt: skip


async def _stored(nc: Any, count: int) -> None:
    while (await stream_info(nc, EVENTS))["state"]["messages"] < count:
        pass


async def _measure() -> dict[str, float]:
    async with EmbeddedServer() as server:
        nc = await nats.connect(server.url)
        await ensure_streams(nc, BusSettings(url=server.url))
        payload, headers = codec.encode(_event(1))
        subject = codec.subject_of(_event(1))
        start = time.perf_counter()
        for number in range(EVENTS_SENT):
            await nc.publish(subject, payload, headers=headers)
            if number % 256 == 0:
                await nc.flush()
        await _stored(nc, EVENTS_SENT)
        bare = EVENTS_SENT / (time.perf_counter() - start)
        start = time.perf_counter()
        for seq in range(1, EVENTS_SENT + 1):
            event = _event(seq)
            payload, headers = codec.encode(event)
            await nc.publish(subject, payload, headers=headers)
            if seq % 256 == 0:
                await nc.flush()
        await _stored(nc, 2 * EVENTS_SENT)
        ours = EVENTS_SENT / (time.perf_counter() - start)
        async with connect(server.url) as kv:
            stream = kv.finished(after=EVENTS_SENT)
            start = time.perf_counter()
            for _ in range(EVENTS_SENT):
                await anext(stream)
            followed = EVENTS_SENT / (time.perf_counter() - start)
            await stream.close()
        await nc.close()
    print(f"published and stored {ours:8.0f} events/s, {ours / bare:.2f} of bare publishes ({bare:.0f}/s)")
    print(f"followed by a client {followed:8.0f} events/s")
    return {"published_per_s": ours, "of_bare_publishes": ours / bare, "followed_per_s": followed}


def run() -> dict[str, Any]:
    """Prints the table; the target is 10,000 events a second published per process."""
    figures: dict[str, Any] = run_fast(_measure)
    return figures
