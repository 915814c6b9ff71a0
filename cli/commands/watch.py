# SPDX-License-Identifier: Apache-2.0
"""`semkv watch`: follow events, commands and their results as they pass, readable."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from semkv.bus import subjects
from semkv.cli import bus_call
from semkv.cli.output import console, errors, print_json

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from semkv.bus import KV


def watch(
    session: bus_call.Session = None,
    seconds: Annotated[float | None, typer.Option(help="End after this long.", min=0.1)] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after this many messages.", min=1)] = None,
    tenant: bus_call.Tenant = None,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Follow everything of a tenant until Ctrl-C: finished requests, commands, each rank's results.

    Examples: semkv watch --session billing; semkv watch --json --seconds 60
    """
    from semkv.bus import codec
    from semkv.cli.live.lines import line, session_of

    shown, full = 0, asyncio.Event()

    async def work(kv: KV) -> None:
        nats = (await kv.session()).nc
        commands: dict[str, str | None] = {}

        async def show(message: Msg) -> None:
            nonlocal shown
            if full.is_set():
                return
            try:
                decoded = codec.decode(message.subject, message.headers, message.data)
            except codec.DecodeError as error:
                errors.print(f"{message.subject}: {error}", markup=False, highlight=False)
                return
            if session is not None and session != session_of(decoded, commands):
                return
            if as_json:
                print_json({"type": decoded.type, **decoded.model_dump(mode="json")})
            elif (told := line(decoded)) is not None:
                console.print(f"{datetime.now():%H:%M:%S.%f}  {told}", highlight=False, markup=False, soft_wrap=True)
            else:
                return
            shown += 1
            if shown == count:
                full.set()

        await nats.subscribe(f"{subjects.PREFIX}.{subjects.token(kv.tenant)}.>", cb=show)
        await nats.flush()
        errors.print(f"watching tenant {kv.tenant}; Ctrl-C ends", markup=False, highlight=False)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(full.wait(), seconds)

    bus_call.on_bus(nats_url, tenant, work)
