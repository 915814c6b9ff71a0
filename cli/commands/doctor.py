# SPDX-License-Identifier: Apache-2.0
"""`semkv doctor`: what is wrong between here and the engines, and the fix for each finding."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from semkv.bus.errors import BusError
from semkv.bus.settings import BusSettings, SettingsError
from semkv.cli import bus_call
from semkv.cli.output import BAD_INPUT, PARTIAL, UNREACHABLE, console, fail, print_json

if TYPE_CHECKING:
    from semkv.cli.doctor.checks import Finding

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "bold red")}


def doctor(tenant: bus_call.Tenant = None, nats_url: bus_call.NatsUrl = None, as_json: bus_call.AsJson = False) -> None:
    """Check environment, server, streams, clock, engines, hashes, tiers, commands and rights, with the fix for each.

    Changes nothing, but makes streams that are absent. Run it with the variables that the engine, or the agent, gets.
    Ends with 1 if something is wrong (✗; what is only worth a look is !), with 3 if the server cannot be used.

    Example: semkv doctor --nats-url nats://127.0.0.1:4222
    """
    from semkv.cli.doctor import checks

    try:
        settings = BusSettings.from_env()
        settings = replace(settings, url=nats_url or settings.url, tenant=tenant or settings.tenant)
    except SettingsError as error:
        fail(str(error), BAD_INPUT)
    found = checks.environment({**os.environ, **({"SEMKV_NATS_URL": nats_url} if nats_url else {})})
    reached = True
    try:
        found += asyncio.run(_on_the_bus(settings))
    except SettingsError as error:
        fail(str(error), BAD_INPUT)
    except BusError as error:
        reached = False
        found.append(checks.unreachable(error))
    _print(found, as_json)
    if not reached:
        raise typer.Exit(UNREACHABLE)
    if any(finding.level is checks.Level.BAD for finding in found):
        raise typer.Exit(PARTIAL)


async def _on_the_bus(settings: BusSettings) -> list[Finding]:
    from semkv.bus import KV
    from semkv.cli.doctor import checks

    kv = KV(settings, timeout=bus_call.CONNECT_S)
    try:
        session = await kv.session()
        found = checks.server(session.nc)
        found += await checks.streams(session.nc, session.link, settings)
        found += await checks.clock(session.nc, settings)
        await session.registry.settled()
        live = session.registry.live()
        found += checks.engines(live)
        found += await checks.round_trip(kv, live)
        return found + checks.rights(session.link)
    finally:
        await kv.close()


def _print(found: list[Finding], as_json: bool) -> None:
    for finding in found:
        if as_json:
            row = {"topic": finding.topic, "level": finding.level.value, "text": finding.text, "fix": finding.fix}
            print_json(row)
            continue
        mark, style = _MARKS[finding.level.value]
        console.print(f"[{style}]{mark}[/] {finding.topic:<12}", end="")
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':15}→ {finding.fix}", markup=False, highlight=False, soft_wrap=True, style="dim")
