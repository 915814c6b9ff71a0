# SPDX-License-Identifier: Apache-2.0
"""`semkv why`: why the memory map gave a command, and what became of it."""

from __future__ import annotations

import sqlite3
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from semkv.cli.output import BAD_INPUT, console, fail, print_json


def why(
    command_id: Annotated[
        str | None, typer.Argument(help="The command, as results and spans name it; without it, the newest decisions.")
    ] = None,
    store: Annotated[Path, typer.Option(help="The memory map's file.", envvar="SEMKV_MEMORY_STORE")] = Path(
        "memory.db"
    ),
    session: Annotated[str | None, typer.Option(help="Only this session's decisions.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many of the newest.", min=1, max=20_000)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One decision a line, with all its details.")] = False,
) -> None:
    """Say why a command was given: the moment, the reason, the search behind it, each rank's result.

    Ends with 2 if the map knows no such command.

    Example: semkv why 0197a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b --store memory.db
    """
    from semkv.consumers.memory import Store, StoreError
    from semkv.consumers.memory.explain import words

    if not store.is_file():
        # Opening would make an empty one.
        fail(f"--store: {store} is no file; name the memory map's, or set SEMKV_MEMORY_STORE", BAD_INPUT)
    try:
        opened = Store(store)
        try:
            if command_id is None:
                decisions = opened.decisions.recent(session=session, limit=limit)
            else:
                found = opened.decisions.by_command(command_id)
                decisions = [] if found is None else [found]
        finally:
            opened.close()
    except (StoreError, sqlite3.Error) as error:
        fail(f"--store: {store}: {error}", BAD_INPUT)
    if command_id is not None and not decisions:
        fail(f"{store} knows no command {command_id!r:.80}: it was given by someone else, or long ago", BAD_INPUT)
    if as_json:
        for decision in decisions:
            print_json(asdict(decision))
        return
    if command_id is not None:
        console.print(words(decisions[0]), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table("when", "session", "moment", "what", "chunks", "outcome", "because", box=None, pad_edge=False)
    for decision in decisions:
        when = f"{datetime.fromtimestamp(decision.at / 1e9):%m-%d %H:%M:%S}"
        what = f"{decision.action} {decision.command_id or ''}".strip()
        row = (decision.session, decision.moment, what, str(decision.chunks), decision.outcome, decision.reason)
        table.add_row(when, *row)
    console.print(table)
