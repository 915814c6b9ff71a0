# SPDX-License-Identifier: Apache-2.0
"""A lookup gives back exactly the pins it took, of exactly the objects it pinned, whatever fails in between.

LMCache 0.4.3/0.4.4 pins disk entries in the lookup and never unpins them, unpins objects that nothing pinned (loads
from a remote store), loses the pins of chunks that were found but could not be loaded, and one tier's exception loses
all the others' objects. Here the lookup remembers what it pinned by identity; a tier that fails counts as loading
nothing; the clean-up unpins what the lookup pinned and releases each object once.

Threads: the lookup runs on the storage loop, the clean-up on the forward thread or the lookup server's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from semkv.consumers.storage import disk_entries
from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")

_OWN_PINS = ("LocalCPUBackend", "LocalDiskBackend", "RemoteBackend")


class Loaded(list[Any]):
    """Per tier the loaded (key, object) pairs, with the identities this lookup holds a pin of."""

    def __init__(self, tiers: list[Any], pinned: frozenset[int]) -> None:
        super().__init__(tiers)
        self.pinned = pinned


class _Tier:
    """One backend's part of a lookup: what it pinned, and how that is given back."""

    def __init__(self, name: str, backend: Any, keys: list[Any], pin: bool) -> None:
        self.name = name
        self.backend = backend
        self.keys = keys
        self.hot: list[Any] = []
        self.metas: list[Any] = []
        self.pinned: set[int] = set()
        if not pin:
            return
        if name == "LocalCPUBackend":
            with backend.cpu_lock:
                self.hot = [backend.hot_cache.get(key) for key in keys]
        elif name == "LocalDiskBackend":
            with backend.disk_lock:
                self.metas = [meta for meta in (backend.dict.get(key) for key in keys) if meta is not None]

    def settle(self, loaded: list[Any]) -> list[tuple[Any, Any]]:
        """Give back the pins that no loaded object carries on to the clean-up."""
        if self.metas:
            disk_entries.unpin(self.backend, self.metas)
        for index, memory_obj in enumerate(self.hot):
            if index < len(loaded) and memory_obj is loaded[index]:
                self.pinned.add(id(memory_obj))
            elif memory_obj is not None:
                memory_obj.unpin()
        if self.name not in _OWN_PINS:
            self.pinned.update(id(memory_obj) for memory_obj in loaded if memory_obj.is_pinned)
        return list(zip(self.keys, loaded, strict=False))


async def _load(manager: Any, tier: _Tier, lookup_id: str, cumulative: list[int]) -> list[tuple[Any, Any]]:
    spec = {"cum_chunk_lengths": cumulative[: len(tier.keys) + 1]}
    getting = tier.backend.batched_get_non_blocking(lookup_id, tier.keys, spec)
    loaded: list[Any] = []
    try:
        loaded = await manager.async_serializer.run(getting, len(tier.keys))
    except Exception as error:
        getting.close()
        logger.error("lookup %s loads nothing from %s: %s: %s", lookup_id, tier.name, type(error).__name__, error)
    return tier.settle(loaded)


def _release(loaded: Any) -> None:
    pinned = getattr(loaded, "pinned", None)
    for tier in loaded:
        for _, memory_obj in tier:
            if pinned is None or id(memory_obj) in pinned:
                memory_obj.unpin()
            memory_obj.ref_count_down()


def _make_lookup(_current: AnyFunction) -> AnyFunction:
    from lmcache.v1.event_manager import EventStatus, EventType

    def drop_forgotten(manager: Any, lookup_id: str) -> None:
        # A second lookup under one id would make the first one's objects unreachable.
        events = manager.event_manager
        if events.get_event_status(EventType.LOADING, lookup_id) == EventStatus.DONE:
            try:
                _release(events.pop_event(EventType.LOADING, lookup_id).result())
            except Exception as error:
                logger.error("lookup %s: its earlier load cannot be released: %s", lookup_id, error)

    async def find(lookup_id: str, name: str, backend: Any, keys: list[Any], pin: bool) -> int:
        try:
            hits: int = await backend.batched_async_contains(lookup_id, keys, pin)
        except Exception as error:
            logger.error("lookup %s finds nothing in %s: %s: %s", lookup_id, name, type(error).__name__, error)
            return 0
        return hits

    async def async_lookup_and_prefetch(
        self: Any,
        lookup_id: str,
        keys: list[Any],
        cum_chunk_lengths: list[int],
        search_range: list[str] | None = None,
        pin: bool = False,
    ) -> None:
        """Find the longest prefix over the tiers and start loading it."""
        drop_forgotten(self, lookup_id)
        everything = list(cum_chunk_lengths)
        tiers: list[_Tier] = []
        tasks: list[asyncio.Task[Any]] = []
        rest, cumulative = keys, everything
        for name, backend in self.get_active_storage_backends(search_range=search_range):
            hits = await find(lookup_id, name, backend, rest, pin)
            if hits == 0:
                continue
            tier = _Tier(name, backend, rest[:hits], pin)
            task = asyncio.create_task(_load(self, tier, lookup_id, cumulative))
            task.add_done_callback(functools.partial(self.prefetch_single_done_callback, keys=rest, backend_name=name))
            tiers.append(tier)
            tasks.append(task)
            rest, cumulative = rest[hits:], cumulative[hits:]
            if not rest:
                break
        if not tasks:
            if self.async_lookup_server is not None:
                self.async_lookup_server.send_response_to_scheduler(lookup_id, 0)
            return

        async def gather() -> Loaded:
            results = await asyncio.gather(*tasks)
            return Loaded(results, frozenset().union(*(tier.pinned for tier in tiers)))

        done = asyncio.create_task(gather())
        self.event_manager.add_event(EventType.LOADING, lookup_id, done)
        expected = [len(tier.keys) for tier in tiers]
        done.add_done_callback(lambda task: self.prefetch_all_done_callback(task, lookup_id, everything, expected))

    return async_lookup_and_prefetch


def _make_cleanup(_current: AnyFunction) -> AnyFunction:
    from lmcache.v1.event_manager import EventStatus, EventType

    def cleanup_memory_objs(self: Any, lookup_id: str) -> None:
        """Give back what the finished load of this lookup holds."""
        events = self.event_manager
        try:
            if events.get_event_status(EventType.LOADING, lookup_id) != EventStatus.DONE:
                return
            _release(events.pop_event(EventType.LOADING, lookup_id).result())
        except Exception as error:
            logger.error("lookup %s cannot be cleaned up: %s: %s", lookup_id, type(error).__name__, error)

    return cleanup_memory_objs


PATCH = Patch(
    name="selective_unpin",
    reason="lookups leave disk entries pinned, unpin what they never pinned, and lose objects when one tier fails",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.storage_manager:StorageManager.async_lookup_and_prefetch",
            _make_lookup,
            frozenset({"c318d2ad3a172ece"}),
        ),
        Replacement(
            "lmcache.v1.cache_engine:LMCacheEngine.cleanup_memory_objs",
            _make_cleanup,
            frozenset({"9beb3b7d7e585094"}),
        ),
    ),
    requires=("disk_load",),
)
