# SPDX-License-Identifier: Apache-2.0
"""One answer from several ranks' answers, and a body's fields checked before anything runs.

Pure functions. Errors: `BadRequestError` names the field, the value and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semkv.bus import hashes
from semkv.bus.status import Tier

LOCATIONS = {"LocalCPUBackend": Tier.CPU, "LocalDiskBackend": Tier.DISK, "RemoteBackend": Tier.REMOTE}
_LABEL_LIMIT = 256


class BadRequestError(ValueError):
    """A body that cannot be acted on."""


@dataclass(frozen=True)
class Request:
    """A checked body. `tiers` is None for the local tiers."""

    chunk_hashes: tuple[int, ...]
    lookup_id: str | None
    tiers: tuple[Tier, ...] | None
    session: str | None
    force: bool


def read_body(body: Any, *, needs_lookup_id: bool) -> Request:
    """Check a body of either route."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body must be a JSON object")
    texts = body.get("chunk_hashes")
    if not isinstance(texts, list) or not texts:
        raise BadRequestError(f"chunk_hashes must be a list of at least one hash, not {texts!r:.60}")
    try:
        chunk_hashes = hashes.parse_all(texts, limit=hashes.MAX_PER_MESSAGE)
    except hashes.HashError as error:
        raise BadRequestError(f"chunk_hashes: {error}") from error
    return Request(
        chunk_hashes,
        _label(body, "lookup_id", needed=needs_lookup_id),
        _tiers(body.get("locations")),
        _label(body, "session", needed=False),
        _flag(body, "force"),
    )


def _label(body: Mapping[str, Any], name: str, *, needed: bool) -> str | None:
    value = body.get(name)
    if value is None and not needed:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _LABEL_LIMIT:
        raise BadRequestError(f"{name} must be a text of 1 to {_LABEL_LIMIT} characters, not {value!r:.60}")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, not {value!r:.60}")
    return value


def _tiers(locations: Any) -> tuple[Tier, ...] | None:
    if locations is None:
        return None
    known = ", ".join(LOCATIONS)
    if not isinstance(locations, list) or not locations:
        raise BadRequestError(f"locations must be a list of some of {known}, or absent, not {locations!r:.60}")
    for position, name in enumerate(locations):
        if not isinstance(name, str) or name not in LOCATIONS:
            raise BadRequestError(f"locations[{position}] is {name!r:.60}; known are {known}")
    return tuple(LOCATIONS[name] for name in locations)


INNER = ("removed", "gone")
PASSIVE = "passive"


def merged(
    op: str, request_count: int, lookup_id: str | None, ranks: Mapping[str, Mapping[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """HTTP status and body from each rank's part; a part with `error` is a rank that did not answer well.

    A chunk counts as evicted if some rank removed it and no answering rank has a copy left in the tiers named.
    `removed` and `gone` of a part are positions in the request. Passive ranks have nothing to add: they are shown only.
    """
    failed = [name for name, part in ranks.items() if "error" in part]
    shown = {name: {k: v for k, v in part.items() if k not in INNER} for name, part in ranks.items()}
    acting = {name: part for name, part in ranks.items() if PASSIVE not in part}
    if failed and len(failed) == len(acting):
        return 504, {"error": f"no rank answered: {', '.join(failed)}", "ranks": shown}
    body: dict[str, Any]
    if op == "prefetch":
        body = {"status": "prefetch_started", "lookup_id": lookup_id, "num_chunks": request_count}
    else:
        answered = [part for part in acting.values() if "error" not in part]
        removed = set[int]().union(*(part.get("removed", ()) for part in answered))
        gone = removed.intersection(*(part.get("gone", ()) for part in answered))
        body = {"status": "success", "num_evicted": len(gone)}
    body["ranks"] = shown
    return (207, body | {"status": "partial"}) if failed else (200, body)
