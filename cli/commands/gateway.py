# SPDX-License-Identifier: Apache-2.0
"""`semkv gateway`: the REST gateway, in the foreground."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def gateway(
    host: Annotated[str | None, typer.Option(help="Where to listen; default 127.0.0.1.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="The port; default 6999.", min=0, max=65535)] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="The NATS server.", envvar="SEMKV_NATS_URL", show_default=False)
    ] = None,
) -> None:
    """Serve the REST gateway until Ctrl-C. Other settings, and the tokens' file, come from SEMKV_GATEWAY_*.

    Example: semkv gateway --port 6999
    """
    from semkv.consumers.gateway.main import main

    given = {"SEMKV_GATEWAY_HOST": host, "SEMKV_GATEWAY_PORT": port, "SEMKV_NATS_URL": nats_url}
    env = {**os.environ, **{key: str(value) for key, value in given.items() if value is not None}}
    raise typer.Exit(main(env))
