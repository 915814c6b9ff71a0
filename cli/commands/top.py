# SPDX-License-Identifier: Apache-2.0
"""`semkv top`: engines, tiers, commands and what prefetches were worth, live."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from semkv.bus import subjects
from semkv.cli import bus_call
from semkv.cli.output import console, print_json

if TYPE_CHECKING:
    from semkv.bus import KV


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two pictures.", min=0.1)] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after this many pictures.", min=1)] = None,
    tenant: bus_call.Tenant = None,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Follow engines, tiers, commands and prefetch outcomes until Ctrl-C.

    Example: semkv top --json -n 1
    """
    from semkv.cli.live.picture import Seen, picture

    async def work(kv: KV) -> None:
        seen = Seen()
        nc = (await kv.session()).nc
        await nc.subscribe(f"{subjects.PREFIX}.{subjects.token(kv.tenant)}.*.*.>", cb=seen.take)
        pictures = 0
        moving = not as_json and console.is_terminal and count != 1
        with Live(console=console, auto_refresh=False, transient=False) if moving else _Silent() as screen:
            while True:
                live = await kv.engines()
                if as_json:
                    print_json(seen.as_dict(live))
                elif isinstance(screen, Live):
                    screen.update(picture(seen, live, kv.tenant), refresh=True)
                else:
                    console.print(picture(seen, live, kv.tenant))
                pictures += 1
                if pictures == count:
                    return
                await asyncio.sleep(interval)

    bus_call.on_bus(nats_url, tenant, work)


class _Silent:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
