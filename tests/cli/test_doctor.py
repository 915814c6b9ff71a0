# SPDX-License-Identifier: Apache-2.0
"""`semkv doctor` beside each fault it knows, made for real: the finding is there, and says what to do."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import nats
import pytest
from nats.js.api import StorageType, StreamConfig
from typer.testing import CliRunner

from semkv.bus import auth
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.streams import AGENT, ensure_streams
from semkv.cli.app import app
from semkv.cli.doctor import checks
from semkv.consumers.rank import RankIdentity, RankWorker
from semkv.consumers.storage.ops import TierInfo
from tests.consumers.gateway.conftest import DOMAIN, rank_of
from tests.consumers.rank.stand_in import StandInStorage

__all__ = ["rank_of"]

Ranks = Callable[..., RankWorker]


def healthy() -> StandInStorage:
    storage = StandInStorage(disk={1, 2})
    storage.tiers = lambda: [TierInfo("cpu", 100, 10, 1), TierInfo("disk", 100, 20, 2)]  # type: ignore[method-assign]
    return storage


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in ("VLLM_PLUGINS", "SEMKV_NATS_URL", "SEMKV_TENANT"):
        monkeypatch.delenv(name, raising=False)


def doctor(url: str, code: int, **env: str) -> dict[str, list[tuple[str, str, str]]]:
    """Topic -> (level, text, fix) of each finding."""
    done = CliRunner().invoke(app, ["doctor", "--nats-url", url, "--json"], env=env)
    assert done.exit_code == code, done.output
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in map(json.loads, done.stdout.splitlines()):
        found.setdefault(row["topic"], []).append((row["level"], row["text"], row["fix"]))
    return found


def wrong(found: dict[str, list[tuple[str, str, str]]]) -> list[str]:
    return [text for rows in found.values() for level, text, _ in rows if level != "ok"]


def test_it_finds_nothing_wrong_with_a_live_rank(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    storage = healthy()
    rank_of(storage)
    found = doctor(nats_server.url, 0)
    assert wrong(found) == []
    texts = " ".join(text for rows in found.values() for _, text, _ in rows)
    for said in ("nats-server 2.", "SEMKV_COMMANDS", "SEMKV_EVENTS", "SEMKV_RESULTS", "e0: 1 storage ranks of 1"):
        assert said in texts
    assert "1 of 1 ranks answered" in found["commands"][0][1]
    assert [name for name, _ in storage.calls] == ["locate"], "looking changes nothing"


def test_for_people_each_finding_stands_above_its_fix(nats_server: EmbeddedServer) -> None:
    done = CliRunner().invoke(app, ["doctor", "--nats-url", nats_server.url])
    assert done.exit_code == 1 and "✗ engines" in done.stdout
    assert "→ start one with SEMKV_NATS_URL" in done.stdout[done.stdout.index("no engine is live") :]


def test_plugins_that_leave_semkv_out(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    rank_of(healthy())
    ((level, text, fix),) = (row for row in doctor(nats_server.url, 1, VLLM_PLUGINS="other")["environment"]
                             if "VLLM" in row[1])  # fmt: skip
    assert (level, text) == ("bad", "VLLM_PLUGINS='other' leaves semkv's plugin out")
    assert fix.startswith("VLLM_PLUGINS=other,semkv")
    assert wrong(doctor(nats_server.url, 0, VLLM_PLUGINS="other,semkv")) == []


@pytest.mark.parametrize(
    ("direct", "level", "said"),
    [("1", "ok", "SEMKV_DIRECT is set"), ("perhaps", "bad", "'perhaps'"), ("0", "warn", "SEMKV_NATS_URL is not set")],
)
def test_an_engine_without_nats(direct: str, level: str, said: str) -> None:
    found = checks.environment({"SEMKV_DIRECT": direct, "PYTHONHASHSEED": "0"})
    row = next(row for row in found if row.topic == "environment")
    assert (row.level.value, said in row.text) == (level, True)


@pytest.mark.parametrize("seed", ["random", ""])
def test_a_seed_that_is_no_number(seed: str) -> None:
    environment = {"SEMKV_NATS_URL": "nats://x", **({"PYTHONHASHSEED": seed} if seed else {})}
    (row,) = [row for row in checks.environment(environment) if row.topic == "hashes"]
    assert row.level is checks.Level.WARN and (seed or "not set") in row.text and "PYTHONHASHSEED=0" in row.fix


def test_ranks_that_are_missing_and_hashes_that_differ(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    rank_of(StandInStorage(), rank=0, world_size=3)
    rank_of(StandInStorage(), rank=1, world_size=3, probe=43)
    found = doctor(nats_server.url, 1)
    assert ("bad", "e0: 2 of 3 ranks answer") in [row[:2] for row in found["engines"]]
    assert [row for row in found["hashes"] if row[1] == "e0: its ranks' hashes differ in probe" and "SEED" in row[2]]


def test_ranks_of_different_settings(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    rank_of(StandInStorage(), rank=0, world_size=2)
    rank_of(StandInStorage(), rank=1, world_size=2, chunk_size=128)
    ((_, text, fix),) = [row for row in doctor(nats_server.url, 1)["hashes"] if row[0] == "bad"]
    assert text.endswith("differ in chunk_size") and "same model, chunk size" in fix


def test_a_rank_without_an_ssd_tier_and_a_full_one(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    memory_only, full = StandInStorage(), StandInStorage()
    memory_only.tiers = lambda: [TierInfo("cpu", 100, 10, 1)]  # type: ignore[method-assign]
    full.tiers = lambda: [TierInfo("cpu", 100, 10, 1), TierInfo("disk", 100, 100, 9)]  # type: ignore[method-assign]
    rank_of(memory_only)
    rank_of(full, instance="e1")
    tiers = doctor(nats_server.url, 0)["tiers"]
    fixes = {text: (level, fix) for level, text, fix in tiers}
    level, fix = fixes["e0.0: no SSD tier, so there is nothing to prefetch from"]
    assert level == "warn" and fix.startswith("set local_disk")
    assert fixes["e1.0: disk 100 of 100 B"][1].startswith("normal for a cache")


def test_a_rank_that_announces_itself_and_does_not_answer(
    nats_server: EmbeddedServer, rank_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StandInStorage(disk={1})
    storage.gate.clear()
    monkeypatch.setattr(checks, "ANSWER_S", 0.5)
    rank_of(storage)
    try:
        ((level, text, fix),) = doctor(nats_server.url, 1)["commands"]
    finally:
        storage.gate.set()
    assert level == "bad" and text.startswith("e0.0: no answer") and "logs" in fix


def test_a_rank_that_fails(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1})
    storage.fail_with = RuntimeError("the pool is gone")
    rank_of(storage)
    ((level, text, _),) = doctor(nats_server.url, 1)["commands"]
    assert level == "bad" and "the pool is gone" in text


def test_streams_that_were_made_with_other_limits(nats_server: EmbeddedServer, rank_of: Ranks) -> None:
    async def make() -> None:
        nc = await nats.connect(nats_server.url)
        config = StreamConfig(name="SEMKV_RESULTS", subjects=["semkv.v1.*.*.res.>"], max_age=3600.0, allow_direct=True,
                              storage=StorageType.MEMORY, max_msgs_per_subject=1)  # fmt: skip
        await nc.jetstream().add_stream(config)
        await nc.close()

    asyncio.run(make())
    rank_of(StandInStorage(disk={1}))
    ((level, text, fix),) = [row for row in doctor(nats_server.url, 0)["streams"] if "SEMKV_RESULTS" in row[1]]
    assert (
        level == "warn"
        and "kept 3600 s" in text
        and fix == "semkv would keep 600 s; nats stream edit SEMKV_RESULTS changes it"
    )


def test_a_clock_that_is_wrong(nats_server: EmbeddedServer, rank_of: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of(StandInStorage(disk={1}))
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + 90 * 10**9)
    ((level, text, fix),) = doctor(nats_server.url, 0)["clock"]
    assert level == "warn" and text.endswith("ms ahead of the server's") and "NTP" in fix
    assert 89_000 < int(text.split()[3]) < 91_000


def test_nobody_is_there() -> None:
    ((level, text, fix),) = doctor("nats://127.0.0.1:1", 3)["server"]
    assert level == "bad" and "127.0.0.1:1" in text and fix.startswith("start one (nats-server -js)")


def test_a_server_without_jetstream(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "plain", jetstream=False) as server:
        ((level, text, fix),) = doctor(server.url, 3)["server"]
    assert level == "bad" and "without JetStream" in text and "nats-server -js" in fix


@pytest.fixture
def old_server() -> Iterator[str]:
    """A stand-in that greets as nats-server 2.9.10; nothing else of an old server is needed."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    port = 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.9.10","max_payload":1048576,"proto":1,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    async def listen() -> None:
        nonlocal port
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        ready.set()

    loop.create_task(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert ready.wait(20)
    yield f"nats://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_server_that_is_too_old(old_server: str) -> None:
    ((level, text, fix),) = doctor(old_server, 3)["server"]
    assert level == "bad" and "2.9.10" in text and "2.11" in fix


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, auth.Generated]]:
    """A server with accounts, tenant a's streams made, and an engine on it."""
    made = auth.generate(tmp_path / "auth", ["a"], url="nats://127.0.0.1:4222")
    with EmbeddedServer(tmp_path / "nats", config=made.accounts_config.read_text()) as server:

        def settings(name: str) -> BusSettings:
            return replace(BusSettings.from_env(auth.read_env(made.env[name])), url=server.url)

        async def streams() -> None:
            from semkv.bus.connection import connect_nats

            nc = await connect_nats(settings("a-manager"), name="manager")
            await ensure_streams(nc, settings("a-manager"), AGENT)
            await nc.close()

        asyncio.run(streams())
        worker = RankWorker(settings("engine"), RankIdentity("e0", 0, 1, Role.STORAGE, DOMAIN), healthy())
        worker.start()
        assert worker.wait_ready(30)
        yield server, made
        worker.stop(5)


def test_credentials_that_may_only_look(accounts: tuple[EmbeddedServer, auth.Generated]) -> None:
    server, made = accounts
    assert wrong(doctor(server.url, 0, **auth.read_env(made.env["a-agent"]))) == []
    found = doctor(server.url, 0, **auth.read_env(made.env["a-observer"]))
    ((level, text, fix),) = found["commands"]
    assert level == "warn" and ".cmd." in text and "agent" in fix
    ((level, text, fix),) = found["rights"]
    assert level == "warn" and ".cmd." in text and "TENANT-agent.env" in fix


def test_credentials_that_the_server_does_not_know(
    accounts: tuple[EmbeddedServer, auth.Generated], tmp_path: Path
) -> None:
    server, _ = accounts
    other = auth.generate(tmp_path / "other", ["a"], url="nats://127.0.0.1:4222")
    ((level, text, fix),) = doctor(server.url, 3, **auth.read_env(other.env["a-agent"]))["server"]
    assert level == "bad" and "refused these credentials" in text and "semkv auth" in fix


def test_a_seed_file_that_is_not_there_is_bad_input(nats_server: EmbeddedServer) -> None:
    done = CliRunner().invoke(app, ["doctor", "--nats-url", nats_server.url], env={"SEMKV_NATS_NKEY_SEED_FILE": "/no"})
    assert done.exit_code == 2 and "SEMKV_NATS_NKEY_SEED_FILE" in done.output
