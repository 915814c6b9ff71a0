# SPDX-License-Identifier: Apache-2.0
"""`semkv engines`: the live ranks, their hash domains and their tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from semkv.cli import bus_call
from semkv.cli.output import UNREACHABLE, console, fail, filled, print_json

if TYPE_CHECKING:
    from semkv.bus import KV
    from semkv.bus.messages import EngineInfo


def engines(
    tenant: bus_call.Tenant = None, nats_url: bus_call.NatsUrl = None, as_json: bus_call.AsJson = False
) -> None:
    """List the live ranks. Ends with 3 if there is none.

    Example: semkv engines --json
    """

    async def work(kv: KV) -> list[EngineInfo]:
        return await kv.engines()

    live = bus_call.on_bus(nats_url, tenant, work)
    if as_json:
        for info in live:
            print_json(info.model_dump(mode="json"))
    if not live:
        fail("no engine is live: is one running with SEMKV_NATS_URL set to this server?", UNREACHABLE)
    if as_json:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "role", "model", "domain", "tiers", "in flight"):
        table.add_column(heading)
    for info in live:
        tiers = ", ".join(
            f"{tier.name} {filled(tier.used_bytes, tier.capacity_bytes)} ({tier.chunks} chunks)" for tier in info.tiers
        )
        rank = f"{info.instance}.{info.rank} of {info.world_size}"
        table.add_row(rank, str(info.role), info.hash_domain.model, info.domain, tiers, str(info.inflight))
    console.print(table)
