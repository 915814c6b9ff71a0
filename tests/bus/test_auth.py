# SPDX-License-Identifier: Apache-2.0
"""Accounts as `semkv auth` generates them, on a real server with TLS: everything works, and nothing leaks.

Tenant A can neither read, infer nor command tenant B; an observer cannot command; an agent cannot forge results or
announcements. Each denial is tried with the client that would do it, not only read from the configuration.
"""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from semkv.bus import auth, codec, connect
from semkv.bus.connection import Link, connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import AuthError, PermissionDeniedError
from semkv.bus.messages import EngineInfo, Finished, Result
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.streams import COMMANDS, EVENTS, REGISTRY, RESULTS, ensure_streams
from semkv.bus.tracing import setup_tracing
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN, SAMPLES

RESULT = next(m for m in SAMPLES if isinstance(m, Result))
EVENT = next(m for m in SAMPLES if isinstance(m, Finished))
ENGINE = next(m for m in SAMPLES if isinstance(m, EngineInfo))


class World:
    """A server with accounts for tenants a and b, one engine, and everybody's settings."""

    def __init__(self, server: EmbeddedServer, generated: auth.Generated, ops: StandInStorage) -> None:
        self.server, self.generated, self.ops = server, generated, ops

    def settings(self, name: str) -> BusSettings:
        return replace(BusSettings.from_env(auth.read_env(self.generated.env[name])), url=self.server.url)

    async def nc(self, name: str) -> tuple[Client, Link]:
        link = Link()
        return await connect_nats(self.settings(name), name=name, link=link), link


@pytest.fixture(params=[auth.NKEYS])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    generated = auth.generate(tmp_path / "auth", ["a", "b"], keys=request.param)
    ops = StandInStorage(disk=range(10))
    with EmbeddedServer(tmp_path / "nats", config=generated.accounts_config.read_text()) as server:
        world = World(server, generated, ops)

        async def make_streams() -> None:
            for tenant in "ab":
                nc, link = await world.nc(f"{tenant}-manager")
                await ensure_streams(nc, world.settings(f"{tenant}-manager"), link=link)
                await nc.close()

        asyncio.run(make_streams())
        who = RankIdentity("engine-0", 0, 1, Role.STORAGE, DOMAIN)
        worker = RankWorker(world.settings("engine"), who, ops)
        worker.start()
        assert worker.wait_ready(30)
        yield world
        worker.stop(5)


@pytest.fixture
async def everyone(world: World) -> AsyncIterator[dict[str, tuple[Client, Link]]]:
    clients = {name: await world.nc(name) for name in world.generated.env}
    yield clients
    for nc, _ in clients.values():
        await nc.close()


BOTH = pytest.mark.parametrize("world", [auth.NKEYS, auth.CREDS], indirect=True)


@BOTH
async def test_an_agent_commands_and_reads_across_accounts(world: World) -> None:
    async with connect(settings=world.settings("a-agent")) as kv:
        stream = kv.finished()
        handle = await kv.prefetch([1, 2])
        assert (await handle.result(30)).ok
        again = await kv.prefetch([1, 2], command_id=handle.command_id)
        assert again.duplicate
        assert (await again.result(30)).ok  # read back from the tenant's own results stream
        engine, _ = await world.nc("engine")
        event = EVENT.model_copy(update={"tenant": "a"})
        payload, headers = codec.encode(event)
        await engine.publish(codec.subject_of(event), payload, headers=headers)
        assert (await anext(stream)).request_id == event.request_id
        await stream.close()
        await engine.close()


async def test_results_survive_a_server_crash_across_accounts(world: World) -> None:
    async with connect(settings=world.settings("a-agent")) as kv:
        assert (await (await kv.prefetch([1])).result(30)).ok
        await asyncio.to_thread(world.server.kill)
        await asyncio.to_thread(world.server.start)
        assert (await (await kv.prefetch([2])).result(60)).ok


async def hears_nothing(world: World, name: str, subject: str, trigger: Any) -> None:
    """Neither a subscription of `name` to the subject, if it is allowed at all, nor anything else brings a message."""
    nc, _ = await world.nc(name)
    heard: list[Any] = []

    async def hear(msg: Any) -> None:
        heard.append(msg)

    await nc.subscribe(subject, cb=hear)
    await nc.flush()
    await trigger()
    await nc.flush()
    assert heard == []
    await nc.close()


@pytest.mark.parametrize("spy", ["a-agent", "a-manager", "a-observer"])
@pytest.mark.parametrize(
    "subject", ["semkv.v1.b.*.cmd.>", "semkv.v1.b.*.evt.>", "semkv.v1.b.*.res.>", "semkv.v1.>", ">"]
)
async def test_a_tenant_hears_nothing_of_another(world: World, spy: str, subject: str) -> None:
    async def trigger() -> None:
        async with connect(settings=world.settings("b-agent")) as kv:
            assert (await (await kv.prefetch([1])).result(30)).ok
        engine, _ = await world.nc("engine")
        event = EVENT.model_copy(update={"tenant": "b"})
        payload, headers = codec.encode(event)
        await engine.publish(codec.subject_of(event), payload, headers=headers)
        await engine.flush()
        await engine.close()

    await hears_nothing(world, spy, subject, trigger)


@BOTH
@pytest.mark.parametrize("name", ["a-agent", "a-manager"])
async def test_a_tenant_cannot_command_in_anothers_name(world: World, name: str) -> None:
    async with connect(settings=replace(world.settings(name), tenant="b")) as kv:
        with pytest.raises(PermissionDeniedError):
            await kv.evict([1])
    nc, _ = await world.nc(name)
    body = {"command_id": "x", "client": "c", "chunk_hashes": ["1"], "tenant": "b"}
    await nc.publish(f"semkv.v1.a.{DOMAIN.fingerprint}.cmd.all.evict", json.dumps(body).encode())
    async with connect(
        settings=world.settings("a-agent")
    ) as kv:  # a later command shows that the rank has gone past it
        assert (await (await kv.prefetch([2])).result(30)).ok
    assert [c for c in world.ops.calls if c[0] == "evict"] == []
    await nc.close()


@BOTH
async def test_a_tenant_sees_nothing_of_anothers_streams(world: World) -> None:
    async with connect(settings=world.settings("b-agent")) as kv:
        assert (await (await kv.prefetch([1], command_id="b-secret")).result(30)).ok
    nc, _ = await world.nc("a-manager")
    js = nc.jetstream(timeout=0.5)
    for stream in (COMMANDS, REGISTRY):
        with pytest.raises((nats.errors.TimeoutError, nats.js.errors.Error)):
            await js.stream_info(stream)
    assert (await js.stream_info(RESULTS)).state.messages == 0
    assert (await js.stream_info(EVENTS)).state.messages == 0
    with pytest.raises((nats.errors.TimeoutError, nats.js.errors.Error)):
        await js.get_last_msg(COMMANDS, "semkv.v1.b.>")
    await nc.close()


async def test_a_tenant_does_not_learn_of_anothers_command_by_its_id(world: World) -> None:
    """The same command id of two tenants is two commands: no duplicate is reported, and both run."""
    async with connect(settings=world.settings("b-agent")) as kv:
        assert (await (await kv.prefetch([1], command_id="same")).result(30)).ok
    async with connect(settings=world.settings("a-agent")) as kv:
        handle = await kv.prefetch([1], command_id="same")
        assert not handle.duplicate
        assert (await handle.result(30)).ok


async def denied(nc: Client, link: Link, subject: str, payload: bytes) -> None:
    with pytest.raises(PermissionDeniedError):
        await link.guard(subject, nc.request(subject, payload, timeout=30))


@BOTH
async def test_an_observer_cannot_command_but_sees(world: World, everyone: dict[str, tuple[Client, Link]]) -> None:
    for op in ("prefetch", "evict", "retain", "release", "locate", "cancel"):
        await denied(*everyone["a-observer"], f"semkv.v1.a.{DOMAIN.fingerprint}.cmd.all.{op}", b"{}")
    async with connect(settings=world.settings("a-observer")) as kv:
        with pytest.raises(PermissionDeniedError):
            await kv.prefetch([1])
        assert [info.instance for info in await kv.engines()] == ["engine-0"]
        stream = kv.finished()
        nc, _ = everyone["engine"]
        event = EVENT.model_copy(update={"tenant": "a"})
        payload, headers = codec.encode(event)
        await nc.publish(codec.subject_of(event), payload, headers=headers)
        assert (await anext(stream)).request_id == event.request_id
        await stream.close()


@BOTH
@pytest.mark.parametrize("name", ["a-agent", "a-manager", "a-observer"])
async def test_nobody_but_engines_can_forge_results_events_or_announcements(
    everyone: dict[str, tuple[Client, Link]], name: str
) -> None:
    for message in (RESULT, EVENT, ENGINE):
        forged = message if isinstance(message, EngineInfo) else message.model_copy(update={"tenant": "a"})
        await denied(*everyone[name], codec.subject_of(forged), codec.encode(forged)[0])


@pytest.mark.parametrize("name", ["a-agent", "a-observer"])
@pytest.mark.parametrize("what", ["CREATE", "UPDATE", "DELETE", "PURGE"])
async def test_agents_and_observers_cannot_touch_streams(
    everyone: dict[str, tuple[Client, Link]], name: str, what: str
) -> None:
    await denied(*everyone[name], f"$JS.API.STREAM.{what}.{RESULTS}", b"{}")


async def test_an_engine_cannot_command(everyone: dict[str, tuple[Client, Link]]) -> None:
    await denied(*everyone["engine"], f"semkv.v1.a.{DOMAIN.fingerprint}.cmd.all.evict", b"{}")


def test_seeds_are_private_and_running_again_keeps_them(tmp_path: Path) -> None:
    first = auth.generate(tmp_path, ["a"])
    seeds = {file: file.read_bytes() for file in tmp_path.glob("*.seed")}
    assert len(seeds) == 4
    for file in [*seeds, tmp_path / "tls" / "server-key.pem"]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    auth.generate(tmp_path, ["a", "b"])
    assert {file: file.read_bytes() for file in seeds} == seeds
    for file in (first.accounts_config, first.server_config, *first.env.values()):
        assert not any(seed.strip() in file.read_bytes() for seed in seeds.values())


@BOTH
async def test_secrets_are_in_no_log_and_no_repr(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = world.settings("a-agent")
    if settings.creds:
        seed = settings.creds.read_text().splitlines()[-2]
    else:
        seed = settings.nkey_seed_file.read_text().strip()  # type: ignore[union-attr]
    assert seed.startswith("SU")
    tracer = setup_tracing("test", file=world.server.store_dir / "trace.json")
    async with connect(settings=settings, tracer=tracer) as kv:
        assert (await (await kv.prefetch([1])).result(30)).ok
        shown = repr(settings) + repr(kv) + str(vars(kv)) + caplog.text
    tracer.shutdown()
    spans = (world.server.store_dir / "trace.json").read_text()
    assert "semkv.v1.a." in spans
    shown += spans
    assert seed not in shown
    assert seed not in Path("/proc/self/cmdline").read_text()  # noqa: ASYNC240


async def test_a_server_of_another_authority_is_refused(world: World, tmp_path: Path) -> None:
    other = auth.generate(tmp_path / "other", ["a"])
    with pytest.raises(AuthError, match="SEMKV_NATS_CA"):
        await connect(settings=replace(world.settings("a-agent"), ca=other.ca))


async def test_an_unknown_key_is_refused(world: World, tmp_path: Path) -> None:
    other = auth.generate(tmp_path / "other", ["a"])
    stranger = BusSettings.from_env(auth.read_env(other.env["a-agent"]))
    with pytest.raises(AuthError):
        await connect(settings=replace(stranger, url=world.server.url, ca=world.generated.ca))
