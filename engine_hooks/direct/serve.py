# SPDX-License-Identifier: Apache-2.0
"""Puts the agent routes on LMCache's internal API server of this process, where SEMKV_DIRECT asks for it.

LMCache's server is one app for the process, whichever of its connectors made it; so the ranks of a process are kept
here, and whoever is asked acts on each of them once. The server has no access control: the routes go in only where it
listens on loopback. All functions are called on the process's main thread, `serve_*` before requests come.
Errors: none reach vLLM; what stands in the way is said in one line.
"""

from __future__ import annotations

import logging
from typing import Any

from semkv.bus.hosts import is_loopback
from semkv.consumers.storage.ops import StorageOps
from semkv.engine_hooks import settings
from semkv.engine_hooks.direct.routes import Ranks, install

_log = logging.getLogger("semkv.engine_hooks")

_ranks = Ranks()


def serve_rank(config: Any, worker_id: int, ops: StorageOps | None) -> None:
    """This process holds a rank; without `ops` it is one that keeps no cache of its own."""
    if not settings.direct():
        return
    if ops is None:
        _ranks.passive.add(worker_id)
    else:
        _ranks.storage[worker_id] = ops
    _serve(config, {})


def forget_rank(worker_id: int) -> None:
    """The rank's engine ends; nothing acts on it any more."""
    _ranks.storage.pop(worker_id, None)
    _ranks.passive.discard(worker_id)


def serve_scheduler(config: Any, world_size: int) -> None:
    """This process holds the scheduler: it passes on to every rank's port and merges."""
    if not settings.direct():
        return
    host = str(config.internal_api_server_host)
    named = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    first = int(config.internal_api_server_port_start) + 1
    _serve(config, {worker: f"http://{named}:{first + worker}" for worker in range(world_size)})


def _serve(config: Any, forward_to: dict[int, str]) -> None:
    reason = _hindrance(config)
    if reason is not None:
        _log.error("semkv: direct mode is off: %s", reason)
        return
    from lmcache.v1.internal_api_server import api_server

    hooks = settings.HookSettings.from_env()
    install(api_server.app, _ranks, tenant=hooks.tenant, forward_to=forward_to, forward_s=hooks.direct_wait_s)


def _hindrance(config: Any) -> str | None:
    """Why the routes must not, or cannot, be put on LMCache's server."""
    if not config.internal_api_server_enabled:
        return "internal_api_server_enabled is false; set it to true in LMCache's configuration"
    if config.internal_api_server_socket_path_prefix:
        return "internal_api_server_socket_path_prefix is set, and ranks are reached by port; leave it out"
    host = str(config.internal_api_server_host)
    if not is_loopback(host):
        return (
            f"internal_api_server_host is {host}, and the server has no access control; set it to 127.0.0.1, "
            "or use NATS and semkv gateway"
        )
    return None
