# SPDX-License-Identifier: Apache-2.0
"""What is known when a request finishes, and the `finished.v1` messages made of it.

`FinishedNote` is filled on the scheduler's thread from values that are already there: no hashing, no packing, no
message object. `messages` runs on the publisher's thread and does that work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from semkv.bus.messages.finished import Finished
from semkv.bus.status import HashesStatus
from semkv.engine_hooks.request_ids import api_id
from semkv.native import extension


def _not_read(texts: object) -> tuple[int, ...] | None:
    """Built without its core: the same numbers, read three times slower."""
    return None


_read_plain = extension.function("hash_ints", _not_read)


class FinishedNote:
    """One finished request as the scheduler saw it. `seq` and `epoch` are given when the note enters the ring."""

    __slots__ = (
        "answered_ns",
        "arrived_at",
        "engine_cached_tokens",
        "engine_request_id",
        "epoch",
        "finish_reason",
        "finished_at",
        "generated_tokens",
        "hit_tokens",
        "lookup_ns",
        "prompt_tokens",
        "reason",
        "seq",
        "session",
        "status",
        "tenant",
        "texts",
        "traceparent",
        "tracestate",
    )

    def __init__(self) -> None:
        self.seq = 0
        self.epoch = 0
        self.tenant = "default"
        self.engine_request_id = ""
        self.session: str | None = None
        self.traceparent: str | None = None
        self.tracestate: str | None = None
        self.finish_reason = ""
        self.status = HashesStatus.UNKNOWN
        self.reason: str | None = None
        self.texts: Sequence[str] = ()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.hit_tokens: int | None = None
        self.engine_cached_tokens: int | None = None
        self.arrived_at = 0
        self.finished_at = 0
        self.lookup_ns = 0
        self.answered_ns = 0


def messages(
    note: FinishedNote, *, domain: str, instance: str, epoch: int, chunk_size: int, suffixed: bool, per_part: int
) -> Iterator[Finished]:
    """The event's parts, in order; one where the hashes fit into one message."""
    answered = api_id(note.engine_request_id, suffixed=suffixed)
    request_id = _printable(answered.request_id)
    known = note.status == HashesStatus.KNOWN
    hashes = _ints(note.texts) if known else ()
    parts = max(1, -(-len(hashes) // per_part))
    for part in range(parts):
        # Not validated: these values are the engine's own, not a stranger's, and there are thousands a second.
        yield Finished.model_construct(
            tenant=note.tenant,
            domain=domain,
            instance=instance,
            epoch=epoch,
            seq=note.seq,
            request_id=request_id,
            engine_request_id=_printable(note.engine_request_id),
            index=answered.choice,
            session=note.session,
            finish_reason=note.finish_reason,
            hashes_status=note.status,
            reason=note.reason,
            chunk_hashes=hashes[part * per_part : (part + 1) * per_part],
            part=part + 1,
            parts=parts,
            chunk_size=chunk_size,
            prompt_tokens=note.prompt_tokens,
            lmcache_hit_tokens=note.hit_tokens,
            engine_cached_tokens=note.engine_cached_tokens,
            generated_tokens=note.generated_tokens,
            arrived_at=note.arrived_at,
            finished_at=note.finished_at,
        )


def _ints(texts: Sequence[str]) -> tuple[int, ...]:
    plain = _read_plain(texts)
    return tuple([int(text, 16) for text in texts]) if plain is None else plain


def _printable(request_id: str) -> str:
    """A request id as the bus takes it: a caller may have chosen any text (X-Request-Id)."""
    if len(request_id) <= 256 and request_id.isprintable():
        return request_id or "-"
    return "".join(c if c.isprintable() else "?" for c in request_id[:256]) or "-"
