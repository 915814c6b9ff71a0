# SPDX-License-Identifier: Apache-2.0
"""`semkv evict`: free chunks that no other conversation needs."""

from __future__ import annotations

from typing import Annotated

import typer

from semkv.bus.status import Tier
from semkv.cli import bus_call, chosen


def evict(
    hashes: chosen.Hashes = None,
    file: chosen.HashFile = None,
    of: chosen.Of = None,
    session: bus_call.Session = None,
    tiers: Annotated[list[Tier] | None, typer.Option("--tier", help="Only from these; default the local ones.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also what other conversations use.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    instance: bus_call.Instance = None,
    domain: bus_call.Domain = None,
    tenant: bus_call.Tenant = None,
    timeout: bus_call.Timeout = 30,
    nats_url: bus_call.NatsUrl = None,
    as_json: bus_call.AsJson = False,
) -> None:
    """Free chunks, and say what happened to each on every rank. What others use or read stays, and is said.

    Examples: semkv evict --of garden --tier cpu; semkv evict --session garden 182712a16ca3bf94
    """
    bus_call.run_command(
        nats_url,
        tenant,
        timeout,
        as_json,
        chosen.Chosen.of(hashes, file, of),
        lambda kv, chain: kv.evict(
            chain,
            session=session or of,
            tiers=tiers or None,
            force=force,
            dry_run=dry_run,
            instance=instance,
            domain=domain,
        ),
    )
