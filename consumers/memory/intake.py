# SPDX-License-Identifier: Apache-2.0
"""Takes in finished events: once each, whole, and with losses counted.

The place in the stream is kept after each event, so that a restart goes on there; what comes twice all the same is
known by its engine's process and number. An event whose hashes are not known leaves the chains as they are. Called from
the map's loop.
"""

from __future__ import annotations

from typing import Any

from semkv.bus.status import HashesStatus
from semkv.consumers.memory.chains import Chain, extends
from semkv.consumers.memory.store import Store

__all__ = ["Intake"]

_POSITION = "events:position"
_UNNAMED = "main"


class Intake:
    """From the event stream to the store."""

    def __init__(self, store: Store, agent: str) -> None:
        self._store = store
        self._agent = agent
        self.repeats = 0
        self.unknown = 0

    def resume(self) -> dict[str, Any]:
        """The options that make the client's stream go on where this store stopped."""
        position = self._store.database.meta(_POSITION)
        # A new store begins with what the stream still keeps: sessions that were there before the map was.
        return {"after": int(position) if position is not None else 0}

    def reached(self, stream_seq: int) -> None:
        """Everything up to this place in the stream has been taken in."""
        if stream_seq:
            self._store.database.set_meta(_POSITION, str(stream_seq))

    def take(self, event: Any) -> tuple[Chain | None, Chain | None]:
        """(the chain that was added, the one that a compaction dropped with it)"""
        database = self._store.database
        with database.transaction():
            last = self._store.seen(event.instance, event.epoch, event.tenant)
            if last is not None and event.seq <= last:
                self.repeats += 1
                return None, None
            lost = 0 if last is None else event.seq - last - 1
            self._store.advance(event.instance, event.epoch, event.tenant, event.seq, lost)
            if event.hashes_status != HashesStatus.KNOWN or not event.chunk_hashes:
                self.unknown += 1
                return None, None
            owner = self._store.chains.owner(event.request_id)
            session = event.session or (owner[0] if owner else "")
            topic = owner[1] if owner else ""
            if session:
                row = self._store.sessions.ensure(session, self._agent)
                topic = topic or row.topic or _UNNAMED
                self._store.sessions.touch(session, at=event.finished_at)
            chain = Chain(
                session=session, hashes=tuple(event.chunk_hashes), tenant=event.tenant, domain=event.domain,
                instance=event.instance, request_id=event.request_id, chunk_size=event.chunk_size,
                prompt_tokens=event.prompt_tokens, finished_at=event.finished_at, epoch=event.epoch, seq=event.seq,
                topic=topic,
            )  # fmt: skip
            return chain, self.keep(chain)

    def keep(self, chain: Chain) -> Chain | None:
        """Adds a chain; the session's chain before it, if a compaction was waiting for what it dropped."""
        row = self._store.sessions.get(chain.session) if chain.session else None
        before = self._store.chains.current(chain.session) if row and row.pending else None
        self._store.chains.add(chain)
        if row is None or not row.pending:
            return None
        self._store.sessions.touch(chain.session, pending="")
        if before is None or extends(chain.hashes, before.hashes):
            return None
        return before
