# SPDX-License-Identifier: Apache-2.0
"""`semkv auth`: keys, accounts and certificates for a NATS server that keeps tenants apart."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from semkv.cli.output import BAD_INPUT, console, fail, print_json


class Keys(str, Enum):
    """How users show who they are."""

    NKEYS = "nkeys"
    CREDS = "creds"


def auth(
    tenants: Annotated[list[str], typer.Argument(help="The tenants, each in an account of its own.")],
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Where to write; made if absent, empty, or one made by this.")
    ],
    url: Annotated[
        str | None,
        typer.Option(
            help="How clients reach the server; tls:// also makes certificates. Default tls://127.0.0.1:4222."
        ),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address the certificate is for; repeatable.")
    ] = None,
    keys: Annotated[
        Keys | None,
        typer.Option(
            help="nkeys: users listed in the server's configuration; creds: accounts signed by an operator, and a "
            ".creds file for each user. Default nkeys."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The files as one JSON object.")] = False,
) -> None:
    """Write a server configuration with an account for each tenant, and an environment file for each user.

    The keys are in files that only you can read. Run again on its own folder, it adds the tenants named and keeps
    everybody's keys; the server reads the new configuration on `nats-server --signal reload`. Ends with 2 if the folder
    holds something else, or was made with another --url or --keys.

    Examples: semkv auth -d nats-auth --url tls://nats.example:4222 --host nats.example billing support;
    semkv auth -d nats-auth research
    """
    from semkv.bus import auth as library
    from semkv.bus.errors import BusError
    from semkv.bus.settings import SettingsError

    there: list[str] = []
    chosen = {"url": url, "keys": keys.value if keys else None}
    if directory.is_dir() and any(directory.iterdir()):
        there, made_with = _read(directory)
        for name, value in chosen.items():
            if value not in (None, made_with[name]):
                fail(f"--{name}: {directory} was made with {made_with[name]}: leave it out, or name a new folder",
                     BAD_INPUT)  # fmt: skip
        if host:
            fail(
                f"--host: {directory / 'tls'} keeps its certificate; move that folder away to have a new one", BAD_INPUT
            )
        chosen = made_with
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    try:
        made = library.generate(directory, [*there, *(name for name in tenants if name not in there)], hosts=host,
                                **{"url": "tls://127.0.0.1:4222", **options})  # fmt: skip
    except (BusError, SettingsError, ValueError, OSError) as error:
        fail(str(error), BAD_INPUT)
    if as_json:
        print_json(
            {
                "server_config": str(made.server_config),
                "accounts_config": str(made.accounts_config),
                "ca": None if made.ca is None else str(made.ca),
                "env": {name: str(file) for name, file in made.env.items()},
                "kept": there,
            }
        )
        return
    if there:
        console.print(f"kept: {', '.join(there)}", highlight=False, markup=False, soft_wrap=True)
        console.print("the server, when it runs: nats-server --signal reload", highlight=False)
    else:
        console.print(f"the server: nats-server -c {made.server_config}", highlight=False, markup=False, soft_wrap=True)
    for name, file in made.env.items():
        console.print(f"  {name:<24} {file}", highlight=False, markup=False, soft_wrap=True)
    console.print("each process: set -a; . FILE; set +a", highlight=False)


def _read(directory: Path) -> tuple[list[str], dict[str, str | None]]:
    """The tenants of a folder made by this command, and what it was made with. Ends the command on another folder."""
    from semkv.bus import auth as library

    try:
        engine = library.read_env(directory / "engine.env")
        made_with: dict[str, str | None] = {
            "url": engine["SEMKV_NATS_URL"],
            "keys": (Keys.CREDS if "SEMKV_NATS_CREDS" in engine else Keys.NKEYS).value,
        }
        files = sorted(directory.glob("*-agent.env"))
        return [library.read_env(file)["SEMKV_TENANT"] for file in files], made_with
    except (OSError, UnicodeDecodeError, KeyError):
        fail(f"--directory: {directory} is not empty and was not made by this command: name a new one", BAD_INPUT)
