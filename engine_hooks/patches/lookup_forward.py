# SPDX-License-Identifier: Apache-2.0
"""Lets LMCache's lookup-client decorators pass `cancel_lookup` on.

LMCache's `request_finished` calls `lookup_client.cancel_lookup` for every aborted request when async loading is on.
`HitLimitLookupClient`, `ChunkStatisticsLookupClient` and the clients without async lookups have no such method, so the
first aborted request raises AttributeError out of the scheduler and ends the engine. Here each link of the chain that
lacks it gets it: pass on to what it decorates, or do nothing at the end of the chain.

Set on the instances, by `forward_cancel(client)`: what is not this engine's client is not touched. Never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forward_cancel(client: Any) -> list[str]:
    """Give each link of the client's chain a `cancel_lookup`; the names of the classes that lacked it."""
    given: list[str] = []
    seen: set[int] = set()
    while client is not None and id(client) not in seen:
        seen.add(id(client))
        inner = getattr(client, "actual_lookup_client", None)
        if not callable(getattr(client, "cancel_lookup", None)):
            client.cancel_lookup = _passing_on(client)
            given.append(type(client).__name__)
        client = inner
    return given


def _passing_on(link: Any) -> Callable[[str], None]:
    def cancel_lookup(lookup_id: str) -> None:
        # Looked up at the call: the decorated client may be replaced or upgraded later.
        inner = getattr(link, "actual_lookup_client", None)
        cancel = getattr(inner, "cancel_lookup", None)
        if callable(cancel):
            cancel(lookup_id)

    return cancel_lookup
