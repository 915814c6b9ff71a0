# SPDX-License-Identifier: Apache-2.0
"""`semkv top` and `semkv watch` while something passes: what they count and say of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from semkv.bus import codec, connect
from semkv.bus.messages import Command, EngineInfo, Outcome, Result
from semkv.bus.status import HashesStatus
from semkv.cli.live.lines import line
from semkv.cli.live.picture import Seen, picture
from tests.cli.conftest import MAIN, Bus, environment
from tests.cli.test_commands import run
from tests.consumers.gateway.test_events import finished, publish
from tests.contracts.samples import DOMAIN, SAMPLES

WORTH = Outcome(
    tenant="default", domain=DOMAIN.fingerprint, instance="engine-0", command_id="c", rank=0, useful=5, redundant=4,
    late=3, wasted=2,
)  # fmt: skip


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`semkv ARGUMENTS…` while it runs."""
    process = subprocess.Popen(
        [*MAIN, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_top_counts_what_passes(bus: Bus) -> None:
    with following("top", "--json", "--interval", "0.1", "--nats-url", bus.url) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["finished"], first["commands"], first["outcomes"]) == (0, {}, {})
        half = finished(1).model_copy(update={"lmcache_hit_tokens": 64})
        second_part = finished(2).model_copy(update={"part": 2, "parts": 2})
        asyncio.run(publish(bus.url, half, second_part, WORTH))
        run("prefetch", "1", "99", "--nats-url", bus.url, code=1)
        seen: dict[str, Any] = {}
        while not (seen.get("commands") and seen["outcomes"] and seen["finished"]):
            seen = json.loads(process.stdout.readline())
    assert (seen["finished"], seen["prompt_tokens"], seen["hit_tokens"]) == (1, 128, 64), "a second part is no request"
    assert seen["commands"] == {"prefetch partial": 1} and seen["unreadable"] == 0
    assert seen["outcomes"] == {"useful": 5, "redundant": 4, "late": 3, "wasted": 2}
    assert seen["engines"][0]["tiers"][0]["chunks"] in (0, 1)


async def test_tops_picture_has_all_of_it() -> None:
    seen = Seen()
    info = next(sample for sample in SAMPLES if isinstance(sample, EngineInfo))
    result = next(sample for sample in SAMPLES if isinstance(sample, Result))
    half = finished(1).model_copy(update={"lmcache_hit_tokens": 64})
    for message in (half, WORTH, result):
        payload, headers = codec.encode(message)
        await seen.take(type("Msg", (), {"subject": codec.subject_of(message), "data": payload, "headers": headers})())
    await seen.take(type("Msg", (), {"subject": "semkv.v1.a.b.evt.c.finished", "data": b"\xc1", "headers": {}})())
    console = Console(width=120, record=True, force_terminal=False)
    console.print(picture(seen, [info], "default"))
    told = console.export_text()
    assert "1 requests finished" in told and "50% of their tokens" in told
    assert "5 useful, 4 redundant, 3 late, 2 wasted" in told
    assert f"{info.instance}.{info.rank}" in told and "1 of 1024 MiB" in told
    assert f"{result.op} {result.command_id[-8:]}" in told and str(result.state) in told
    assert seen.unreadable == 1


def test_watch_shows_one_session_and_the_answers_to_its_commands(bus: Bus) -> None:
    with following("watch", "--session", "billing", "--json", "--nats-url", bus.url) as process:
        assert process.stderr is not None and process.stdout is not None
        process.stderr.readline()

        async def pass_by() -> None:
            await publish(bus.url, finished(1, "garden"), finished(2, "billing"))
            async with connect(bus.url) as kv:
                await (await kv.prefetch([1], session="garden")).result(30)
                mine = await (await kv.prefetch([2], session="billing")).result(30)
                await publish(bus.url, WORTH, WORTH.model_copy(update={"command_id": mine.command_id}))

        asyncio.run(pass_by())
        told = [json.loads(process.stdout.readline()) for _ in range(5)]
    assert sorted(message["type"] for message in told) == ["accepted", "finished", "outcome", "prefetch", "result"]
    assert len({message["command_id"] for message in told if message["type"] != "finished"}) == 1


def test_watch_says_each_thing_in_a_line() -> None:
    said = {type(sample).__name__: line(sample) for sample in SAMPLES}
    assert said["Heartbeat"] is said["Accepted"] is None, "only machines care"
    assert "5 useful, 4 redundant, 3 late, 2 wasted" in (line(WORTH) or "")
    for sample in SAMPLES:
        if isinstance(sample, (Command, Result)):
            assert sample.command_id[:13] in (said[type(sample).__name__] or "")
    assert line(WORTH.model_copy(update=dict.fromkeys(("useful", "redundant", "late", "wasted"), 0))) is None
    event = finished(1, "billing")
    assert "billing: 2 chunks, 128 tokens (0 hit), stop" in (line(event) or "")
    unknown = event.model_copy(update={"chunk_hashes": (), "hashes_status": HashesStatus.UNSTABLE})
    assert "unstable chunks" in (line(unknown) or "")
