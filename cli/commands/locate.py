# SPDX-License-Identifier: Apache-2.0
"""`semkv locate`: which tiers hold each chunk, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from semkv.bus.hashes import to_legacy
from semkv.bus.status import State
from semkv.cli import bus_call, chosen
from semkv.cli.output import PARTIAL, console, print_json

if TYPE_CHECKING:
    from semkv.bus import KV, CommandResult


def locate(
    hashes: chosen.Hashes = None,
    file: chosen.HashFile = None,
    of: chosen.Of = None,
    instance: bus_call.Instance = None,
    domain: bus_call.Domain = None,
    tenant: bus_call.Tenant = None,
    timeout: bus_call.Timeout = 10,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Say which tiers hold each chunk. A chunk that this tenant never used is nowhere, for it.

    Examples: semkv locate --of billing; semkv locate 182712a16ca3bf94 771e0f62298bac5f
    """
    which = chosen.Chosen.of(hashes, file, of)

    async def work(kv: KV) -> tuple[tuple[int, ...], CommandResult]:
        chain = await which.chain(kv)
        return chain, await (await kv.locate(chain, instance=instance, domain=domain)).result(timeout)

    chain, result = bus_call.on_bus(nats_url, tenant, work)
    if as_json:
        print_json(bus_call.as_dict(result))
    else:
        for part in result.results:
            for chunk_hash, tiers in zip(chain, part.chunk_tiers or (), strict=False):
                where = ", ".join(map(str, tiers)) or "nowhere"
                console.print(f"{part.instance}.{part.rank}  {to_legacy(chunk_hash):>17}  {where}", highlight=False)
        for name in result.unanswered:
            console.print(f"{name}  unanswered", highlight=False)
    if result.state != State.SUCCEEDED:
        raise typer.Exit(PARTIAL)
