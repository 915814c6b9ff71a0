# SPDX-License-Identifier: Apache-2.0
"""What a prefetch turned out to be worth: the engines' outcome events, put to the decisions that caused them.

``outcomes(kv)`` reads them with the bus's own client, from now on; the newest word of each rank counts. One asyncio
loop; ends with its reader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from semkv.bus import codec, subjects
from semkv.bus.client import KV
from semkv.bus.messages import Outcome
from semkv.bus.reader import OrderedReader
from semkv.bus.streams import EVENTS
from semkv.consumers.memory.store import Store

__all__ = ["outcomes", "put"]

_FATES = ("useful", "redundant", "late", "wasted")


async def outcomes(kv: KV) -> AsyncIterator[Outcome]:
    """The tenant's outcome events from now on."""
    session = await kv.session()
    where = f"{subjects.PREFIX}.{subjects.token(kv.tenant)}.*.evt.*.outcome"
    async with OrderedReader(session.nc, session.link, EVENTS, [where]) as reader:
        async for message in reader:
            try:
                event = codec.decode(message.subject, message.headers, message.data)
            except codec.DecodeError:
                continue  # hostile or of another version
            if isinstance(event, Outcome):
                yield event


def put(store: Store, event: Any) -> bool:
    """Adds an outcome to its decision; False if the command is not of this store."""
    decision = store.decisions.by_command(event.command_id)
    if decision is None:
        return False
    worth = dict(decision.result.get("worth", {}))
    figures = {fate: int(getattr(event, fate)) for fate in _FATES}
    worth[f"{event.instance}.{event.rank}"] = {**figures, "lead_ms": round(float(event.lead_ms), 1)}
    store.decisions.finish(decision.id, decision.outcome, {**decision.result, "worth": worth})
    return True
