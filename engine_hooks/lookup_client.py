# SPDX-License-Identifier: Apache-2.0
"""HashRecordingLookupClient: LMCache's own lookup client that also remembers the chunk hashes it computed.

An existing client is upgraded in place (`from_existing`): its class is changed, its sockets, threads and state stay.
LMCache's `lookup` runs unmodified; what it asks its token database is listened to. Nothing is hashed twice.

Threads: `lookup`, `get_cached_hashes` and the record belong to the scheduler's thread, as LMCache's `lookup` does.
Bounds: at most `capacity` requests are remembered, the oldest goes first; texts come from a bounded memo.
Errors: none of its own in the engine; a record that could not be made is simply not there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lmcache.v1.lookup_client import lmcache_async_lookup_client as _async_client

DEFAULT_CAPACITY = 1024
DEFAULT_MEMO = 1 << 18
GROUP = 16
SESSION_LABEL = "lmcache.semkv.session"
TENANT_LABEL = "lmcache.semkv.tenant"
CHUNKS_LABEL = "lmcache.semkv.chunks"
TRACE_LABEL = "lmcache.semkv.traceparent"


class HashTexts:
    """Memo of LMCache's texts for hashes (`f"{h:x}"`). Conversations share prefixes, so most texts are there.

    Texts are kept by groups of 16 chunks under the group's last hash: hashes are a prefix chain, so that one names the
    other 15. Two generations of at most `limit` texts each. When the young one is full it becomes the old one, and what
    was the old one goes little by little, two groups for each new one: emptying a large dict at once would hold the
    engine for tens of milliseconds.
    """

    def __init__(self, limit: int = DEFAULT_MEMO // 2) -> None:
        self._limit = max(1, limit // GROUP)
        self._young: dict[int, tuple[str, ...]] = {}
        self._old: dict[int, tuple[str, ...]] = {}
        self._going: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """How many texts are kept."""
        return GROUP * (len(self._young) + len(self._old) + len(self._going))

    def of(self, chunks: Sequence[tuple[int, int, int]]) -> list[str]:
        """The texts of a chain as a token database gives it: (start, end, hash) for each chunk, from the first."""
        texts: list[str] = []
        known, extend = self._young.get, texts.extend
        whole = len(chunks) - len(chunks) % GROUP
        for start in range(0, whole, GROUP):
            group = known(chunks[start + GROUP - 1][2])
            if group is None:
                group = self._make(chunks[start : start + GROUP])
                known = self._young.get
            extend(group)
        extend([f"{chunk[2]:x}" for chunk in chunks[whole:]])
        return texts

    def clear(self) -> None:
        self._young, self._old, self._going = {}, {}, {}

    def _make(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[str, ...]:
        """The texts of a group that the young generation lacks."""
        if len(self._young) >= self._limit:
            self._going, self._old, self._young = self._old, self._young, {}
        going = self._going
        if going:
            going.popitem()
            if going:
                going.popitem()
        name = chunks[-1][2]
        group = self._old.pop(name, None)
        if group is None:
            group = tuple([f"{chunk[2]:x}" for chunk in chunks])
        self._young[name] = group
        return group


class LookupRecord:
    """What one request's first lookup said."""

    __slots__ = ("answered_ns", "engine_cached_tokens", "hit_tokens", "started_ns", "texts")

    def __init__(self, texts: list[str], started_ns: int) -> None:
        self.texts = texts
        self.started_ns = started_ns
        self.answered_ns = 0
        self.hit_tokens: int | None = None
        self.engine_cached_tokens: int | None = None


class HashRecords:
    """The bounded record of one client: request id -> LookupRecord, first in, first out."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY, texts: HashTexts | None = None) -> None:
        if capacity < 1:
            raise ValueError(
                f"capacity must be at least 1, got {capacity}: it is the number of live requests remembered"
            )
        self.capacity = capacity
        self.enabled = True
        self.texts = texts if texts is not None else HashTexts()
        self.overflowed = 0
        self._by_id: dict[str, LookupRecord] = {}
        self._current: str | None = None
        self._current_ns = 0
        self._skipped: str | None = None
        # labels for the next lookup of a request, put there by the connector, which knows the request
        self.labels: dict[str, dict[str, str]] = {}
        self.default_labels: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, lookup_id: str) -> bool:
        return lookup_id in self._by_id

    def get(self, lookup_id: str) -> LookupRecord | None:
        return self._by_id.get(lookup_id)

    def pop(self, lookup_id: str) -> LookupRecord | None:
        self.labels.pop(lookup_id, None)
        return self._by_id.pop(lookup_id, None)

    def skip(self, lookup_id: str) -> None:
        """Do not record the next lookup if it is this request's."""
        self._skipped = lookup_id

    def begin(self, lookup_id: str) -> None:
        # The first lookup names exactly the prompt. A later one (after a preemption) has generated tokens in it.
        if self.enabled and lookup_id not in self._by_id and lookup_id != self._skipped:
            self._current = lookup_id
            self._current_ns = time.time_ns()

    def end(self) -> None:
        self._current = None

    def listen(self, results: Iterable[tuple[int, int, Any]]) -> Iterable[tuple[int, int, Any]]:
        """Pass the token database's results on, remembering the hashes if a recorded lookup asked for them."""
        lookup_id = self._current
        if lookup_id is None:
            return results
        self._current = None
        found = list(results)
        self.put(lookup_id, LookupRecord(self.texts.of(found), self._current_ns))
        return found

    def put(self, lookup_id: str, record: LookupRecord) -> None:
        by_id = self._by_id
        if lookup_id not in by_id and len(by_id) >= self.capacity:
            oldest = next(iter(by_id))
            del by_id[oldest]
            self.labels.pop(oldest, None)
            self.overflowed += 1
        by_id[lookup_id] = record

    def label(self, lookup_id: str, request_configs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add session and tenant for the ranks' forests. Not `lmcache.tag.*`, so no key changes."""
        labels = self.labels.pop(lookup_id, None) or self.default_labels
        if not labels:
            return request_configs
        return {**request_configs, **labels} if request_configs else dict(labels)


class _Listening:
    """Stands in for a token database's bound `process_tokens`: the same call, the same results, a listener between."""

    def __init__(self, inner: Any, records: HashRecords) -> None:
        self.inner = inner
        self.records = records

    def __call__(self, *args: Any, **kwargs: Any) -> Iterable[tuple[int, int, Any]]:
        results: Iterable[tuple[int, int, Any]] = self.inner(*args, **kwargs)
        if kwargs.get("make_key", True):
            return results  # keys, not hashes
        return self.records.listen(results)


def recording_class(base: Any) -> Any:
    """The recording subclass of a lookup client's class.

    It has `base` as its only base: Python gives an existing object another class only where the layout is that one's.
    """
    if base in _classes:
        return _classes[base]

    class Recording(base):  # type: ignore[misc]  # the base is known at run time only
        """The lookup client of LMCache, recording. Made only from an existing one."""

        _semkv_records: HashRecords

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise TypeError(
                f"{type(self).__name__} is not built directly: it would bind a second set of sockets. "
                "Upgrade the engine's client with HashRecordingLookupClient.from_existing(client)."
            )

        @classmethod
        def from_existing(cls, client: Any, *, records: HashRecords | None = None) -> Any:
            """Upgrade the client at the end of `client`'s decorators and return `client` (the outermost)."""
            inner = innermost(client)
            if not isinstance(inner, base):
                raise TypeError(
                    f"from_existing needs a {base.__name__} behind {type(client).__name__}, found "
                    f"{type(inner).__name__}: is enable_async_loading off, or another lookup client configured?"
                )
            upgrade(inner, HashRecords() if records is None else records)
            return client

        def lookup(self, token_ids: Any, lookup_id: str, request_configs: dict[str, Any] | None = None) -> int | None:
            records = self._semkv_records
            records.begin(lookup_id)
            try:
                found: int | None = super().lookup(token_ids, lookup_id, records.label(lookup_id, request_configs))
                return found
            finally:
                records.end()

        def get_cached_hashes(self, lookup_id: str) -> list[str] | None:
            """The hashes of this request's prompt as LMCache's texts, once: the record is gone afterwards."""
            record = self._semkv_records.pop(lookup_id)
            return None if record is None else record.texts

    Recording.__name__ = f"HashRecording{base.__name__.removeprefix('LMCacheAsync').removeprefix('LMCache')}"
    Recording.__qualname__ = Recording.__name__
    _classes[base] = Recording
    return Recording


_classes: dict[Any, Any] = {}
HashRecordingLookupClient: Any = recording_class(_async_client.LMCacheAsyncLookupClient)


def chain(client: Any) -> Iterator[Any]:
    """The client and what it decorates, outermost first. A loop in the chain ends it."""
    seen: set[int] = set()
    while client is not None and id(client) not in seen:
        seen.add(id(client))
        yield client
        client = getattr(client, "actual_lookup_client", None)


def innermost(client: Any) -> Any:
    last = client
    for link in chain(client):
        last = link
    return last


def records_of(client: Any) -> HashRecords | None:
    """The record of an upgraded client, seen through its decorators."""
    found = getattr(innermost(client), "_semkv_records", None)
    return found if isinstance(found, HashRecords) else None


def can_listen(inner: Any) -> bool:
    """Whether the client hashes with a token database of its own. The bypass client borrows the engine's, and stores
    go through that on other threads; Mooncake's asks for keys, not hashes."""
    # Asked of the module: LMCache-Ascend puts its own subclass there.
    return (
        isinstance(inner, _async_client.LMCacheAsyncLookupClient)
        or type(inner).__name__ == "LMCacheLookupClient"
        or is_recording(inner)
    )


def is_recording(inner: Any) -> bool:
    """Whether the client has been upgraded."""
    return isinstance(getattr(inner, "_semkv_records", None), HashRecords)


def upgrade(inner: Any, records: HashRecords) -> None:
    """Change one undecorated client in place. A second call keeps the first record."""
    if is_recording(inner):
        return
    inner.__class__ = recording_class(type(inner))
    inner._semkv_records = records
    # On the instance, so that no other owner of the class is touched.
    inner.token_database.process_tokens = _Listening(inner.token_database.process_tokens, records)
