# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway until SIGINT or SIGTERM: ``main()`` for a command line, ``serve(settings)`` for a caller's loop."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping

import uvicorn

from semkv.bus.settings import SettingsError
from semkv.consumers.gateway.app import create_app
from semkv.consumers.gateway.settings import GatewaySettings, GatewaySettingsError

__all__ = ["GatewayServer", "main", "server"]

_GRACE_S = 5


class GatewayServer(uvicorn.Server):
    """uvicorn's server, which ends event streams first: it waits for open connections before the lifespan ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.stopping.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def server(settings: GatewaySettings) -> GatewayServer:
    """A server that is not running yet; ``serve()`` it on the caller's loop."""
    return GatewayServer(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_level="info",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


def main(env: Mapping[str, str] | None = None) -> int:
    """The command line's way in: settings from the environment; 2 for settings that cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        settings = GatewaySettings.from_env(env)
    except (GatewaySettingsError, SettingsError) as error:
        print(f"semkv gateway: {error}", file=sys.stderr)
        return 2
    try:
        server(settings).run()
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # uvicorn says itself why it could not bind
        return int(end.code or 0) if isinstance(end.code, int) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
