# SPDX-License-Identifier: Apache-2.0
"""`semkv prefetch`: load chunks into DDR (or the device stage) on every rank."""

from __future__ import annotations

from typing import Annotated

import typer

from semkv.bus.status import Order, Tier
from semkv.cli import bus_call, chosen


def prefetch(
    hashes: chosen.Hashes = None,
    file: chosen.HashFile = None,
    of: chosen.Of = None,
    session: bus_call.Session = None,
    order: Annotated[Order, typer.Option(help="One prefix chain in order, or a set.")] = Order.PREFIX,
    tier: Annotated[Tier, typer.Option(help="Where to: cpu, or device.")] = Tier.CPU,
    expires_in_ms: Annotated[int | None, typer.Option(help="Give up after this, counted from now.", min=1)] = None,
    budget_bytes: Annotated[int | None, typer.Option(help="Load at most this many bytes on a rank.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    instance: bus_call.Instance = None,
    domain: bus_call.Domain = None,
    tenant: bus_call.Tenant = None,
    timeout: bus_call.Timeout = 30,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Load chunks from slower tiers, and say what happened to each on every rank. Ends with 1 if not all was loaded.

    Examples: semkv prefetch --of billing; semkv prefetch --session billing 182712a16ca3bf94 771e0f62298bac5f
    """
    bus_call.run_command(
        nats_url,
        tenant,
        timeout,
        as_json,
        chosen.Chosen.of(hashes, file, of),
        lambda kv, chain: kv.prefetch(
            chain,
            session=session or of,
            order=order,
            tier=tier,
            expires_in_ms=expires_in_ms,
            budget_bytes=budget_bytes,
            dry_run=dry_run,
            instance=instance,
            domain=domain,
        ),
    )
