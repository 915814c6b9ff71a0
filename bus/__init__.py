# SPDX-License-Identifier: Apache-2.0
"""semkv.bus: the contracts, the codec, the NATS connection, tracing, and the agent's client. Pure Python.

`from semkv.bus import connect` is all an agent needs. Names are imported on first use, so that importing this package
(or one of its message modules) costs nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv.bus.client import KV, CommandHandle, CommandResult, connect
    from semkv.bus.client.blocking import connect_blocking

_HOMES = {
    "KV": "semkv.bus.client",
    "CommandHandle": "semkv.bus.client",
    "CommandResult": "semkv.bus.client",
    "connect": "semkv.bus.client",
    "connect_blocking": "semkv.bus.client.blocking",
}

__all__ = ["KV", "CommandHandle", "CommandResult", "connect", "connect_blocking"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
