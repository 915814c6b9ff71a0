# SPDX-License-Identifier: Apache-2.0
"""What commands say of answers that are bad, late or not there, and of whom the chunks are; in tables and in JSON."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from semkv.bus import CommandHandle, CommandResult
from semkv.bus.messages import Finished, Prefetch, Result
from semkv.bus.status import Op, State
from semkv.cli import chosen
from semkv.cli.replay.recording import announced
from tests.cli.conftest import Bus
from tests.cli.test_commands import run
from tests.consumers.gateway.test_events import finished, publish
from tests.contracts.samples import DOMAIN

COMMANDS = ("locate", "prefetch", "evict")


@pytest.mark.parametrize("name", COMMANDS)
def test_not_all_of_it_done_is_1_and_all_is_0(name: str, bus: Bus) -> None:
    url = ("--nats-url", bus.url)
    assert run(name, "1", *url).exit_code == 0
    bus.storage.fail_with = RuntimeError("the pool is gone")
    told = json.loads(run(name, "1", *url, "--json", code=1).stdout)
    assert told["state"] == "failed" and "the pool is gone" in told["ranks"][0]["reason"]
    assert name == "locate" or "the pool is gone" in run(name, "1", *url, code=1).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_rank_that_does_not_answer_is_named_and_not_waited_for_longer(
    name: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, result = [], CommandHandle.result

    async def waits(handle: CommandHandle, timeout: float | None = None) -> CommandResult:
        waited.append(timeout)
        return await result(handle, timeout)

    monkeypatch.setattr(CommandHandle, "result", waits)
    url = ("--nats-url", bus.url, "--timeout", "0.5")
    bus.storage.gate.clear()
    try:
        told = json.loads(run(name, "1", *url, "--json", code=1).stdout)  # the rank answers never
        assert told["ranks"] == [] and told["unanswered"] == ["engine-0.0"]
        (line,) = (line for line in run(name, "2", *url, code=1).stdout.splitlines() if "engine-0.0" in line)
        assert line.split()[:2] == ["engine-0.0", "unanswered"]
        assert waited == [0.5, 0.5]
    finally:
        bus.storage.gate.set()


def test_locate_says_for_each_chunk_where_it_is(bus: Bus) -> None:
    run("prefetch", "2", "--nats-url", bus.url)
    lines = run("locate", "2", "1", "63", "--nats-url", bus.url).stdout.splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [
        ["engine-0.0", "2", "cpu, disk"], ["engine-0.0", "1", "disk"], ["engine-0.0", "63", "nowhere"],
    ]  # fmt: skip


class TestSessionOption:
    def test_the_session_goes_with_its_chunks(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without it an evict would find the session's own conversation in the way."""
        sessions = []
        for name in ("prefetch", "evict"):
            method = getattr(bus.storage, name)
            monkeypatch.setattr(
                bus.storage, name, lambda *a, method=method, **k: (sessions.append(k["session"]), method(*a, **k))[1]
            )
        asyncio.run(publish(bus.url, finished(1, "billing", (1, 2))))
        for name in ("prefetch", "evict"):
            run(name, "--of", "billing", "--nats-url", bus.url)
            run(name, "--of", "billing", "--session", "other", "--nats-url", bus.url)
        assert sessions == ["billing", "other"] * 2

    def test_the_parts_of_a_long_chain_are_put_together_and_no_others(self, bus: Bus) -> None:
        def part(number: int, request: str, hashes: tuple[int, ...]) -> Finished:
            event = finished(number, "billing", hashes)
            return event.model_copy(update={"part": number, "parts": 2, "engine_request_id": request})

        asyncio.run(publish(bus.url, part(1, "old", (7, 8)), part(1, "new", (1, 2)), part(2, "new", (3, 4))))
        run("locate", "--of", "billing", "--nats-url", bus.url)
        asyncio.run(publish(bus.url, part(2, "lost its first", (5, 6))))
        run("locate", "--of", "billing", "--nats-url", bus.url)
        assert bus.storage.calls == [("locate", (1, 2, 3, 4)), ("locate", (5, 6))]

    def test_so_many_events_are_looked_through_and_no_more(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(publish(bus.url, *(finished(number, f"s{number}", (number,)) for number in range(1, 6))))
        monkeypatch.setattr(chosen, "BACK", 3)
        run("locate", "--of", "s3", "--nats-url", bus.url)
        told = run("locate", "--of", "s2", "--nats-url", bus.url, code=2).stderr
        assert "'s2'" in told and "s5, s4, s3" in told


def test_replay_counts_and_names_an_answer_that_does_not_come(bus: Bus, tmp_path: Path) -> None:
    where = {"tenant": "default", "domain": DOMAIN.fingerprint, "instance": "engine-0"}
    command = Prefetch(**where, command_id="c", client="a", chunk_hashes=(1,))
    answers = [
        Result(**where, command_id="c", client="a", op=Op.PREFETCH, rank=rank, world_size=2, epoch=1,
               state=State.SUCCEEDED) for rank in (0, 1)
    ]  # fmt: skip
    file = tmp_path / "day.jsonl"
    file.write_text("".join(announced(item, time.time_ns()).line() + "\n" for item in (command, *answers)))
    asked = ("replay", file, "--live", bus.url, "--patience", "1")
    there, lost, total = (json.loads(line) for line in run(*asked, "--json", code=1).stdout.splitlines())
    assert there["replayed"]["state"] == "succeeded" and (lost["rank"], lost["replayed"]) == (1, None)
    assert total["unanswered"] == 1
    assert "1 answers did not come" in run(*asked, code=1).stdout
