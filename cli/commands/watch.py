# SPDX-License-Identifier: Apache-2.0
"""`semkv watch`: follow events, commands and their results as they pass, readable."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import Annotated

import typer
from nats.aio.msg import Msg

from semkv.bus import KV, codec, subjects
from semkv.bus.messages import Accepted, Command, Finished, Heartbeat, Message, Outcome, Result
from semkv.cli import bus_call
from semkv.cli.output import console, errors, print_json


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
            if session is not None and session != _session(decoded, commands):
                return
            if as_json:
                print_json({"type": decoded.type, **decoded.model_dump(mode="json")})
            elif (line := _line(decoded)) is not None:
                console.print(f"{datetime.now():%H:%M:%S.%f}  {line}", highlight=False, markup=False, soft_wrap=True)
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


def _session(message: Message, commands: dict[str, str | None]) -> str | None:
    """The session a message is about; a result's is its command's, kept from when that passed."""
    if isinstance(message, (Accepted, Result, Outcome)):
        return commands.get(message.command_id)
    session = getattr(message, "session", None)
    if isinstance(message, Command):
        commands[message.command_id] = session
        while len(commands) > 10_000:
            del commands[next(iter(commands))]
    return session


def _line(message: Message) -> str | None:
    """One line for a person; None for what only machines care about."""
    match message:
        case Finished():
            known = len(message.chunk_hashes) if message.chunk_hashes else message.hashes_status
            return (
                f"finished  {message.instance}  {message.request_id}  {message.session or '-'}: {known} chunks, "
                f"{message.prompt_tokens} tokens ({message.lmcache_hit_tokens or 0} hit), {message.finish_reason}"
            )
        case Heartbeat() | Accepted():
            return None
        case Result():
            counts = ", ".join(f"{count} {status}" for status, count in message.counts.items() if count)
            size = sum(message.bytes_by_tier.values()) / 1e6
            return (
                f"result    {message.instance}.{message.rank}  {message.command_id[:13]}  "
                f"{message.op} {message.state}: {counts or message.reason or 'nothing'}, "
                f"{size:.1f} MB, {message.ran_ms:.1f} ms"
            )
        case Outcome():
            return (
                f"outcome   {message.instance}.{message.rank}  {message.command_id[:13]}  {message.useful} useful, "
                f"{message.redundant} redundant, {message.late} late, {message.wasted} wasted"
            )
        case Command():
            hashes = len(getattr(message, "chunk_hashes", ()))
            asked = f"{hashes} chunks" if hashes else ""
            return f"{message.type:<9} {message.instance}  {message.command_id[:13]}  by {message.client} {asked}"
        case _:
            return f"{message.type}  {message.instance}"
