# SPDX-License-Identifier: Apache-2.0
"""What the commands that speak on the bus share: the connection's options, running, errors in one line, results.

The server's address comes from `--nats-url` or SEMKV_NATS_URL; credentials only from files and the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from semkv.bus.errors import BusError
from semkv.bus.hashes import HashError
from semkv.bus.settings import SettingsError
from semkv.bus.status import State
from semkv.cli.chosen import Chosen
from semkv.cli.output import BAD_INPUT, PARTIAL, UNREACHABLE, console, fail, print_json

if TYPE_CHECKING:
    from semkv.bus import KV, CommandHandle, CommandResult

NatsUrl = Annotated[
    str | None, typer.Option("--nats-url", help="The NATS server.", envvar="SEMKV_NATS_URL", show_default=False)
]
Tenant = Annotated[str | None, typer.Option(help="The tenant; default SEMKV_TENANT, else “default”.")]
Instance = Annotated[str | None, typer.Option(help="One engine; without it, every engine of the hash domain.")]
Domain = Annotated[str | None, typer.Option(help="The hash domain's fingerprint, where several are live.")]
Session = Annotated[str | None, typer.Option(help="The conversation the chunks belong to.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for every rank's result.", min=0.1)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
CONNECT_S = 5.0

T = TypeVar("T")


def on_bus(url: str | None, tenant: str | None, work: Callable[[KV], Awaitable[T]]) -> T:
    """Connect, do `work`, close. Errors of the bus end the command with one line."""
    from semkv.bus import connect

    async def run() -> T:
        async with connect(url, tenant=tenant, timeout=CONNECT_S) as kv:
            return await work(kv)

    try:
        return asyncio.run(run())
    except (HashError, SettingsError) as error:
        fail(str(error), BAD_INPUT)
    except BusError as error:
        fail(str(error), UNREACHABLE)


def run_command(
    url: str | None,
    tenant: str | None,
    timeout: float,
    as_json: bool,
    chosen: Chosen,
    send: Callable[[KV, tuple[int, ...]], Awaitable[CommandHandle]],
) -> None:
    """Send one command, wait for every rank, print each result; exit code 1 if not all of it was done."""

    async def work(kv: KV) -> CommandResult:
        return await (await send(kv, await chosen.chain(kv))).result(timeout)

    result = on_bus(url, tenant, work)
    if as_json:
        print_json(as_dict(result))
    else:
        print_result(result)
    if result.state != State.SUCCEEDED:
        raise typer.Exit(PARTIAL)


def as_dict(result: CommandResult) -> dict[str, object]:
    """A result as JSON has it."""
    return {
        "command_id": result.command_id,
        "op": result.op,
        "state": str(result.state),
        "reason": result.reason,
        "usable_prefix": result.usable_prefix,
        "counts": {str(status): count for status, count in result.counts().items()},
        "ranks": [part.model_dump(mode="json", exclude={"client", "tenant", "command_id"}) for part in result.results],
        "unanswered": [str(name) for name in result.unanswered],
    }


def print_result(result: CommandResult) -> None:
    """A result as a table of ranks."""
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "state", "chunks", "MB", "queued ms", "ran ms", "reason"):
        table.add_column(heading, justify="right" if heading in ("MB", "queued ms", "ran ms") else "left")
    for part in result.results:
        chunks = ", ".join(f"{count} {status}" for status, count in part.counts.items() if count)
        size = sum(part.bytes_by_tier.values()) / 1e6
        table.add_row(
            f"{part.instance}.{part.rank}",
            str(part.state),
            chunks,
            f"{size:.1f}",
            f"{part.queued_ms:.1f}",
            f"{part.ran_ms:.1f}",
            part.reason or "",
        )
    for name in result.unanswered:
        table.add_row(str(name), "unanswered", "", "", "", "", "")
    console.print(f"{result.op} {result.command_id}: {result.state}", highlight=False)
    console.print(table)
