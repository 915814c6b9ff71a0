# SPDX-License-Identifier: Apache-2.0
"""`semkv record`: keep what passes on the bus in a file."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semkv.bus import subjects
from semkv.cli import bus_call
from semkv.cli.output import BAD_INPUT, INTERRUPTED, errors, fail, print_json

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from semkv.bus import KV


def record(
    file: Annotated[Path, typer.Argument(help="The recording; it must not be there yet.")],
    seconds: Annotated[float | None, typer.Option(help="End after this long.", min=0.1)] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after this many messages.", min=1)] = None,
    tenant: bus_call.Tenant = None,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Record a tenant's events, commands and results until Ctrl-C, for `semkv replay`.

    In the file are hashes, names and times, as on the bus: no prompt and no token.

    Example: semkv record monday.jsonl --seconds 3600
    """
    from semkv.cli.replay.recording import Recorded, announced

    try:
        out = file.open("x", encoding="utf-8")
    except FileExistsError:
        fail(f"{file} is there already; a recording overwrites nothing", BAD_INPUT)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", BAD_INPUT)
    written, full = 0, asyncio.Event()

    async def work(kv: KV) -> None:
        nc = (await kv.session()).nc
        for info in await kv.engines():
            out.write(announced(info, time.time_ns()).line() + "\n")

        async def keep(message: Msg) -> None:
            nonlocal written
            if full.is_set():
                return
            out.write(Recorded(time.time_ns(), message.subject, message.headers or {}, message.data).line() + "\n")
            out.flush()
            written += 1
            if count is not None and written >= count:
                full.set()

        await nc.subscribe(f"{subjects.PREFIX}.{subjects.token(kv.tenant)}.>", cb=keep)
        await nc.flush()
        errors.print(f"recording tenant {kv.tenant} into {file}; Ctrl-C ends", markup=False, highlight=False)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(full.wait(), seconds)

    interrupted = False
    try:
        bus_call.on_bus(nats_url, tenant, work)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        out.close()
        kept = file.stat().st_size > 0
        if not kept:
            file.unlink()
    if as_json:
        print_json({"file": str(file) if kept else None, "messages": written})
    else:
        told = f"{written} messages in {file}" if kept else "nothing passed, and no engine is live: no file was kept"
        errors.print(told, markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
