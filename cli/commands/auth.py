# SPDX-License-Identifier: Apache-2.0
"""`semkv auth`: keys, accounts and certificates for a NATS server that keeps tenants apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, console, fail, print_json


def auth(
    tenants: Annotated[list[str], typer.Argument(help="The tenants, each in an account of its own.")],
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Where to write; made if absent, must be empty.")
    ],
    url: Annotated[str, typer.Option(help="How clients reach the server; tls:// also makes certificates.")] = (
        "tls://127.0.0.1:4222"
    ),
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address the certificate is for; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The files as one JSON object.")] = False,
) -> None:
    """Write a server configuration with an account for each tenant, and an environment file for each user.

    The keys are in files that only you can read. Nothing is overwritten.

    Example: semkv auth -d nats-auth --url tls://nats.example:4222 --host nats.example billing support
    """
    from semkv.bus import auth as library
    from semkv.bus.errors import BusError
    from semkv.bus.settings import SettingsError

    if directory.exists() and any(directory.iterdir()):
        fail(f"--directory: {directory} is not empty; keys are never overwritten: name a new one", BAD_INPUT)
    try:
        made = library.generate(directory, tenants, url=url, hosts=host)
    except (BusError, SettingsError, ValueError, OSError) as error:
        fail(str(error), BAD_INPUT)
    if as_json:
        print_json(
            {
                "server_config": str(made.server_config),
                "accounts_config": str(made.accounts_config),
                "ca": None if made.ca is None else str(made.ca),
                "env": {name: str(file) for name, file in made.env.items()},
            }
        )
        return
    console.print(f"the server: nats-server -c {made.server_config}", highlight=False, soft_wrap=True)
    for name, file in made.env.items():
        console.print(f"  {name:<24} {file}", highlight=False, soft_wrap=True)
    console.print("each process: set -a; . FILE; set +a", highlight=False)
