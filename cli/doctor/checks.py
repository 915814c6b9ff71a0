# SPDX-License-Identifier: Apache-2.0
"""Looks at the environment, the server, the streams, the clock, the engines and the rights, and says how to mend each.

Every check returns findings and raises nothing of the bus; a check that could not be made is itself a finding. Nothing
is changed on the server. One event loop.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from semkv.bus.client import KV
from semkv.bus.clock import BrokerClock
from semkv.bus.connection import Link
from semkv.bus.errors import (
    AuthError,
    BusError,
    NoJetStreamError,
    PermissionDeniedError,
    ServerTooOldError,
)
from semkv.bus.messages import EngineInfo
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.streams import AGENT, ENGINE, stream_configs, stream_info
from semkv.cli.output import filled
from semkv.engine_hooks import settings

ANSWER_S = 5.0
_NOBODYS = 1
"""A chunk hash to ask about that no prompt is expected to have."""
SKEW_WARN_S = 1.0
FULL = 0.98
NEWEST = ("nats-py", "nkeys", "pydantic", "msgpack", "blake3")


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One thing found; `fix` says what to do about it, where something is to be done."""

    topic: str
    level: Level
    text: str
    fix: str = ""


def environment(env: Mapping[str, str]) -> list[Finding]:
    """The variables that an engine started from here would get."""
    found = []
    try:
        direct = settings.direct(env)
    except settings.SettingError as error:
        direct = False
        found.append(Finding("environment", Level.BAD, f"engines started from here are not hooked: {error}"))
    if direct:
        found.append(
            Finding("environment", Level.OK, "SEMKV_DIRECT is set: engines answer agents on LMCache's own server")
        )
    elif not env.get("SEMKV_NATS_URL"):
        found.append(
            Finding(
                "environment",
                Level.WARN,
                "SEMKV_NATS_URL is not set: engines started from here are not hooked",
                "export SEMKV_NATS_URL=nats://HOST:4222, or SEMKV_DIRECT=1 for two routes without NATS",
            )
        )
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and "semkv" not in allowed.split(","):
        found.append(
            Finding(
                "environment",
                Level.BAD,
                f"VLLM_PLUGINS={allowed!r} leaves semkv's plugin out",
                f"VLLM_PLUGINS={','.join(filter(None, [allowed, 'semkv']))}, or unset it",
            )
        )
    seed = env.get("PYTHONHASHSEED", "")
    if not (seed.isascii() and seed.isdigit()):
        found.append(
            Finding(
                "hashes",
                Level.WARN,
                f"PYTHONHASHSEED is {seed or 'not set'}: LMCache's builtin hashes differ between processes",
                "PYTHONHASHSEED=0 for every process of an engine, or the blake3 algorithm",
            )
        )
    versions = []
    for name in NEWEST:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding("environment", Level.BAD, f"{name} is not installed", f"pip install {name}"))
    return [*found, Finding("environment", Level.OK, ", ".join(versions))]


def unreachable(error: BusError) -> Finding:
    """Why the server could not be used, with the fix that goes with it."""
    fix = "start one (nats-server -js), or name it in SEMKV_NATS_URL or with --nats-url"
    if isinstance(error, ServerTooOldError):
        fix = "install nats-server 2.11 or newer; it reads the same configuration and data"
    elif isinstance(error, NoJetStreamError):
        fix = "start it with nats-server -js, or add `jetstream {}` to its configuration"
    elif isinstance(error, AuthError):
        fix = "set -a; . FILE; set +a with a file that `semkv auth` wrote for this user"
    return Finding("server", Level.BAD, str(error), fix)


def server(nc: Client) -> list[Finding]:
    """What answered: `connect_nats` refuses servers that are too old, so this is one that will do."""
    limit, version = nc.max_payload, nc.connected_server_version
    found = [
        Finding(
            "server",
            Level.OK,
            f"nats-server {version.major}.{version.minor}.{version.patch}, messages up to {limit} bytes",
        )
    ]
    if limit < 65536:
        found.append(
            Finding(
                "server", Level.WARN, f"max_payload is {limit}: every command is split into many", "raise it to 1MB"
            )
        )
    url = nc.connected_url
    if url is not None and url.hostname not in {"127.0.0.1", "localhost", "::1"} and url.scheme != "tls":
        fix = "use a tls:// URL; `semkv auth` makes certificates and keys"
        found.append(Finding("server", Level.WARN, "the connection leaves this machine unencrypted", fix))
    return found


async def streams(nc: Client, link: Link, settings: BusSettings) -> list[Finding]:
    """Whether each stream is there, with the limits that the promises rest on."""
    found = []
    configs = {str(config.name): config for side in (ENGINE, AGENT) for config in stream_configs(settings, side)}
    for name, wanted in configs.items():
        if settings.accounts and name not in {str(c.name) for c in stream_configs(settings, AGENT)}:
            continue  # it is in the engines' account, out of a tenant's sight
        try:
            info = await link.guard(f"$JS.API.STREAM.INFO.{name}", stream_info(nc, name))
        except nats.js.errors.NotFoundError:
            found.append(
                Finding(
                    "streams", Level.WARN, f"{name} does not exist yet", "start an engine and one agent: they make it"
                )
            )
        except (BusError, nats.errors.Error, nats.js.errors.Error, asyncio.TimeoutError) as error:
            found.append(
                Finding(
                    "streams",
                    Level.BAD,
                    f"{name} cannot be asked about: {error or type(error).__name__}",
                    "is JetStream on (nats-server -js), and may this user read stream information?",
                )
            )
        else:
            config, state = info["config"], info["state"]
            age = config.get("max_age", 0) / 1e9
            text = f"{name}: {state.get('messages', 0)} messages, {state.get('bytes', 0)} bytes, kept {age:.0f} s"
            differs = wanted.max_age is not None and abs(age - wanted.max_age) >= 1
            fix = f"semkv would keep {wanted.max_age:.0f} s; nats stream edit {name} changes it" if differs else ""
            found.append(Finding("streams", Level.WARN if differs else Level.OK, text, fix))
    return found


async def clock(nc: Client, settings: BusSettings) -> list[Finding]:
    """This machine's clock against the server's."""
    measured = BrokerClock()
    name = str(stream_configs(settings, AGENT)[-1].name)
    try:
        for _ in range(3):
            await stream_info(nc, name, measured)
    except (nats.errors.Error, nats.js.errors.Error, asyncio.TimeoutError):
        return [Finding("clock", Level.WARN, "not measured: no stream could be asked for the server's time")]
    if not measured.measured:
        return [Finding("clock", Level.WARN, "not measured: the server does not tell its time")]
    skew = (measured.now_ns() - time.time_ns()) / 1e9
    text = f"this clock is {abs(skew) * 1000:.0f} ms {'behind' if skew > 0 else 'ahead of'} the server's"
    if abs(skew) < SKEW_WARN_S:
        return [Finding("clock", Level.OK, text)]
    fix = "expiry is measured on the server's clock and does not suffer; traces do: run NTP on both"
    return [Finding("clock", Level.WARN, text, fix)]


def engines(live: Sequence[EngineInfo]) -> list[Finding]:
    """Who is live, whether all ranks are, whether their hashes mean the same, and how full their tiers are."""
    if not live:
        return [
            Finding(
                "engines",
                Level.BAD,
                "no engine is live",
                "start one with SEMKV_NATS_URL set to this server; its log says in one line if semkv refused it",
            )
        ]
    found = []
    for instance in sorted({info.instance for info in live}):
        ranks = [info for info in live if info.instance == instance]
        storage = [info for info in ranks if info.role == Role.STORAGE]
        world = ranks[0].world_size
        if len({info.rank for info in storage}) + sum(info.role == Role.PASSIVE for info in ranks) < world:
            found.append(
                Finding(
                    "engines",
                    Level.BAD,
                    f"{instance}: {len(storage)} of {world} ranks answer",
                    "look into the missing workers' logs; without them commands end as unanswered",
                )
            )
        else:
            found.append(Finding("engines", Level.OK, f"{instance}: {len(storage)} storage ranks of {world}"))
        found += _same_hashes(instance, storage)
        found += [finding for info in storage for finding in _tiers(info)]
    return found


async def round_trip(kv: KV, live: Sequence[EngineInfo]) -> list[Finding]:
    """Asks every domain's ranks where a chunk is that nobody has: changes nothing, and goes the way of all commands."""
    found = []
    for domain in sorted({info.domain for info in live if info.role == Role.STORAGE}):
        began = time.monotonic()
        try:
            result = await (await kv.locate([_NOBODYS], domain=domain)).result(ANSWER_S)
        except PermissionDeniedError as error:
            fix = "commands need a user of the role agent; an observer may only look"
            found.append(Finding("commands", Level.WARN, str(error), fix))
            continue
        except BusError as error:
            found.append(Finding("commands", Level.BAD, f"{domain}: {error}", "see the findings above"))
            continue
        took = (time.monotonic() - began) * 1000
        if result.unanswered:
            silent = ", ".join(str(name) for name in result.unanswered)
            fix = "look into those workers' logs: they announce themselves and do not answer"
            found.append(Finding("commands", Level.BAD, f"{silent}: no answer within {ANSWER_S:g} s", fix))
        elif bad := [part for part in result.results if part.reason]:
            fix = "the reason is the rank's own; its log says more"
            found.append(Finding("commands", Level.BAD, f"{bad[0].instance}.{bad[0].rank}: {bad[0].reason}", fix))
        else:
            ranks = len(result.results)
            found.append(Finding("commands", Level.OK, f"{domain}: {ranks} of {ranks} ranks answered in {took:.0f} ms"))
    return found


def rights(link: Link) -> list[Finding]:
    """What the server refused while the other checks ran."""
    if not link.denied:
        return [Finding("rights", Level.OK, "nothing was refused")]
    refused = ", ".join(sorted({subject for _, subject in link.denied}))
    return [Finding("rights", Level.WARN, f"refused: {refused}", _right(refused))]


def _right(refused: str) -> str:
    if ".cmd." in refused:
        return "set -a; . TENANT-agent.env; set +a: `semkv auth` wrote that file for whoever commands"
    if "stream.create" in refused.lower():
        return "run one client with TENANT-manager.env once: it makes the tenant's streams"
    return "use credentials of another role, see `semkv auth --help`"


def _same_hashes(instance: str, ranks: Sequence[EngineInfo]) -> list[Finding]:
    domains = {info.domain: info.hash_domain for info in ranks}
    if len(domains) <= 1:
        return [Finding("hashes", Level.OK, f"{instance}: one domain, {next(iter(domains))}")] if domains else []
    first, *others = domains.values()
    fields = sorted({field for other in others for field in first.differences(other)})
    fix = (
        "PYTHONHASHSEED=0 for every process of the engine, or the blake3 algorithm"
        if fields == ["probe"]
        else "give every rank the same model, chunk size and Python version"
    )
    return [Finding("hashes", Level.BAD, f"{instance}: its ranks' hashes differ in {', '.join(fields)}", fix)]


def _tiers(info: EngineInfo) -> list[Finding]:
    where = f"{info.instance}.{info.rank}"
    if not any(tier.name == "disk" for tier in info.tiers):
        return [
            Finding(
                "tiers",
                Level.WARN,
                f"{where}: no SSD tier, so there is nothing to prefetch from",
                "set local_disk and max_local_disk_size in LMCache's configuration",
            )
        ]
    found = []
    for tier in info.tiers:
        full = tier.capacity_bytes > 0 and tier.used_bytes >= FULL * tier.capacity_bytes
        text = f"{where}: {tier.name} {filled(tier.used_bytes, tier.capacity_bytes)}"
        fix = (
            "normal for a cache; raise max_local_disk_size if sessions are lost" if full and tier.name == "disk" else ""
        )
        found.append(Finding("tiers", Level.OK, text, fix))
    return found
