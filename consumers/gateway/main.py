# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway until SIGINT or SIGTERM: ``main()`` for a command line, ``serve(settings)`` for a caller's loop."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping

import uvicorn

from semkv.bus.settings import SettingsError
from semkv.consumers.gateway.app import create_app
from semkv.consumers.gateway.settings import GatewaySettings, GatewaySettingsError

__all__ = ["GatewayServer", "main", "server"]

_GRACE_S = 5


class GatewayServer(uvicorn.Server):
    """uvicorn's server, which ends event streams first: it waits for open connections before the lifespan ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.stopping.set()  # type: ignore[union-attr]  # the app is ours, not a name
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


def main(
    env: Mapping[str, str] | None = None,
    *,
    listening: Callable[[str], None] | None = None,
    refused: Callable[[str], None] | None = None,
) -> int:
    """The command line's way in: settings from the environment; 2 for settings and addresses that cannot be used.

    `listening` is told the address once connections are taken; `refused`, in place of stderr, why nothing is served.
    """
    try:
        settings = GatewaySettings.from_env(env)
        taken = _listen(settings)
    except (GatewaySettingsError, SettingsError) as error:
        if refused is not None:
            refused(str(error))
        else:
            print(f"semkv gateway: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if listening is not None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        listening(f"http://{host}:{taken.getsockname()[1]}")
    try:
        server(settings).run(sockets=[taken])
    except KeyboardInterrupt:
        return 130
    finally:
        taken.close()
    return 0


def _listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket, made before anything starts, so that a taken port is one clear line."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # Python adds the address to the text of an error number.
        why = os.strerror(error.errno) if error.errno is not None and error.errno in errno.errorcode else error
        raise GatewaySettingsError(
            f"SEMKV_GATEWAY_HOST, SEMKV_GATEWAY_PORT: {settings.host}:{settings.port} cannot be listened on "
            f"({why}): is a gateway, or LMCache's API server, there already? Choose another with "
            "--port or SEMKV_GATEWAY_PORT"
        ) from None


if __name__ == "__main__":
    raise SystemExit(main())
