# SPDX-License-Identifier: Apache-2.0
"""`semkv gateway`: the REST gateway, in the foreground."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, errors, fail, print_json


def gateway(
    host: Annotated[str | None, typer.Option(help="Where to listen; default 127.0.0.1.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(help="The port; default 6999, 0 takes a free one.", min=0, max=65535)
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="The NATS server.", envvar="SEMKV_NATS_URL", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as JSON; the log is on stderr.")
    ] = False,
) -> None:
    """Serve the REST gateway and its page /ui/ until Ctrl-C.

    Other settings, and the tokens' file, come from SEMKV_GATEWAY_*. Ends with 2 for settings that cannot be used and a
    port that is taken.

    Example: semkv gateway --port 6999
    """
    try:
        from semkv.consumers.gateway.main import main
    except ModuleNotFoundError as error:
        fail(f"the gateway needs {error.name}: pip install 'semkv[gateway]'", BAD_INPUT)

    given = {"SEMKV_GATEWAY_HOST": host, "SEMKV_GATEWAY_PORT": port, "SEMKV_NATS_URL": nats_url}
    env = {**os.environ, **{key: str(value) for key, value in given.items() if value is not None}}

    def said(url: str) -> None:
        # Unlike other commands this one goes on while NATS is away, and its log says so.
        logging.getLogger("semkv").setLevel(logging.INFO)
        if as_json:
            print_json({"url": url, "page": f"{url}/ui/", "pid": os.getpid()})
        else:
            text = f"serving {url}, and its page at {url}/ui/; Ctrl-C ends"
            errors.print(text, markup=False, highlight=False, soft_wrap=True)

    if code := main(env, listening=said, refused=lambda error: fail(error, BAD_INPUT)):
        raise typer.Exit(code)
