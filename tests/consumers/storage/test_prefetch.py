# SPDX-License-Identifier: Apache-2.0
"""Prefetch on a real engine: every status, the invariants after it, and what others may do meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage import files
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control
from semkv.consumers.storage.readers import READERS
from tests.consumers.storage.chunks import bytes_agree, on_disk
from tests.consumers.storage.nobody import Nobody
from tests.consumers.storage.reads import around_reads
from tests.support.lmcache_engine import Rig, checksum
from tests.support.page_cache import forget, pages_cached

LOADED, THERE = ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE
MISSING, UNREACHABLE = ChunkStatus.MISSING, ChunkStatus.UNREACHABLE
NO_MEMORY, NOT_TRIED, FAILED = ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED, ChunkStatus.FAILED


def test_chunks_on_disk_are_loaded_and_left_evictable(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    result = storage.prefetch(hashes)
    assert result.state is State.SUCCEEDED
    assert result.chunk_status == (LOADED,) * 4
    assert result.usable_prefix == 4
    assert result.bytes_by_tier == {"disk": 4 * rig.chunk_bytes}
    assert [step.name for step in result.steps] == ["kv.tier.load disk→cpu"]
    rig.check()
    bytes_agree(rig)
    assert set(rig.counts()["hot"]) == set(hashes)


def test_a_second_prefetch_finds_them_there(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    storage.prefetch(hashes)
    before = rig.counts()
    assert storage.prefetch(hashes).chunk_status == (THERE,) * 4
    assert rig.counts() == before
    rig.check()


def test_a_thousand_rounds_of_prefetch_and_evict_leave_everything_as_it_was(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 6)
    before = rig.counts()
    for _ in range(1000):
        assert storage.prefetch(hashes).chunk_status == (LOADED,) * 6
        assert storage.evict(hashes, tiers=(Tier.CPU,)).chunk_status == (ChunkStatus.REMOVED,) * 6
    assert rig.counts() == before
    rig.check()


def test_a_prefetch_larger_than_the_pool_reports_only_what_is_there(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 24)
    result = storage.prefetch(hashes)
    assert result.state is State.PARTIAL
    good = [h for h, status in zip(hashes, result.chunk_status, strict=True) if status in (LOADED, THERE)]
    assert good == list(hashes[:8]), "half the pool of 16"
    assert result.chunk_status[8:] == (NO_MEMORY, *[NOT_TRIED] * 15)
    assert result.usable_prefix == 8
    assert set(good) <= set(rig.counts()["hot"])
    rig.check()
    bytes_agree(rig)


def test_a_gap_ends_a_chain_but_not_a_set(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    assert storage.evict((hashes[1],)).chunk_status == (ChunkStatus.REMOVED,)
    chain = storage.prefetch(hashes)
    assert chain.chunk_status == (LOADED, MISSING, UNREACHABLE, UNREACHABLE)
    assert chain.usable_prefix == 1
    assert chain.state is State.PARTIAL
    as_set = storage.prefetch(hashes, order=Order.SET)
    assert as_set.chunk_status == (THERE, MISSING, LOADED, LOADED)
    rig.check()


def test_shuffled_and_repeated_hashes_end_as_ordered_ones(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    asked = (hashes[2], hashes[0], hashes[2], hashes[3], hashes[1], hashes[0])
    assert storage.prefetch(asked, order=Order.SET).chunk_status == (LOADED,) * 6
    rig.check()
    assert set(rig.counts()["hot"]) == set(hashes)


def test_unknown_hashes_are_missing(rig: Rig, storage: LMCacheStorage) -> None:
    result = storage.prefetch((1, 2))
    assert result.chunk_status == (MISSING, UNREACHABLE)
    assert storage.prefetch(()).state is State.SUCCEEDED


def test_a_missing_file_is_missing_and_its_entry_goes(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 3)
    Path(rig.disk.dict[rig.keys(rig.tokens(3))[1]].path).unlink()
    assert storage.prefetch(hashes, order=Order.SET).chunk_status == (LOADED, MISSING, LOADED)
    rig.check()
    assert set(rig.counts()["disk"]) == {hashes[0], hashes[2]}


@pytest.mark.parametrize("size", [0, 100, 20000])
def test_a_file_of_another_length_fails_and_is_never_registered(rig: Rig, storage: LMCacheStorage, size: int) -> None:
    hashes = on_disk(rig, 3)
    path = Path(rig.disk.dict[rig.keys(rig.tokens(3))[1]].path)
    os.truncate(path, size)
    result = storage.prefetch(hashes)
    assert result.chunk_status == (LOADED, FAILED, NOT_TRIED)
    assert result.reason is not None and path.name in result.reason
    assert hashes[1] not in rig.counts()["hot"]
    assert not path.exists()
    rig.check()


def test_a_read_that_fails_holds_nothing(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = on_disk(rig, 3)

    def broken(*_args: object, **_kwargs: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "read_full", broken)
    result = storage.prefetch(hashes)
    assert result.state is State.FAILED
    assert result.chunk_status == (FAILED, NOT_TRIED, NOT_TRIED)
    rig.check()
    monkeypatch.undo()
    assert storage.prefetch(hashes).state is State.SUCCEEDED


def test_a_pool_full_of_objects_in_use_is_no_memory_and_harms_nothing(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 2)
    busy = rig.tokens(16, seed=1)
    rig.store(busy)
    held = rig.lookup(busy)
    before = {key.chunk_hash: checksum(obj) for key, obj in rig.cpu.hot_cache.items()}
    assert storage.prefetch(hashes).chunk_status == (NO_MEMORY, NOT_TRIED)
    assert {key.chunk_hash: checksum(obj) for key, obj in rig.cpu.hot_cache.items()} == before
    assert rig.retrieve(held, busy) == 16 * rig.chunk_size
    rig.check()


def test_victims_are_the_oldest_that_nobody_retains_or_talks_about(rig: Rig) -> None:
    forest = Nobody()
    storage = LMCacheStorage(rig.engine, forest)
    hashes = on_disk(rig, 2)
    more = on_disk(rig, 2, seed=2)
    filler = rig.store(rig.tokens(16, seed=1))
    forest.keep.add(filler[0])
    forest.alive.add(filler[1])
    assert storage.prefetch(hashes).state is State.SUCCEEDED
    assert set(rig.counts()["hot"]) == {*hashes, filler[0], filler[1], *filler[4:]}
    forest.alive.update(filler)
    assert storage.prefetch(more).state is State.SUCCEEDED, "live chunks go where there are no others"
    assert filler[0] in rig.counts()["hot"], "retained chunks never go"
    rig.check()


def test_a_budget_bounds_what_is_loaded(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    result = storage.prefetch(hashes, budget_bytes=2 * rig.chunk_bytes + 1)
    assert result.chunk_status == (LOADED, LOADED, NOT_TRIED, NOT_TRIED)
    assert result.reason is not None and "budget" in result.reason
    rig.check()


def test_cancel_and_expiry_stop_between_chunks_and_say_how_far(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 8)
    control = Control()
    around_reads(monkeypatch, lambda path: control.cancel())
    result = storage.prefetch(hashes, control=control)
    assert result.state is State.CANCELLED
    loaded = result.usable_prefix
    assert 1 <= loaded <= READERS, "reads that had begun are counted, no other begins"
    assert result.chunk_status == (LOADED,) * loaded + (NOT_TRIED,) * (8 - loaded)
    assert result.reason == f"cancelled after {loaded} of 8 chunks"
    assert set(rig.counts()["hot"]) == set(hashes[:loaded])
    monkeypatch.undo()
    late = storage.prefetch(hashes, control=Control(deadline_ns=0))
    assert late.state is State.EXPIRED
    assert late.chunk_status == (NOT_TRIED,) * 8
    rig.check()


def test_reads_hold_no_lock(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = on_disk(rig, 2)
    held: list[bool] = []
    locks = (rig.cpu.cpu_lock, rig.disk.disk_lock)
    around_reads(monkeypatch, lambda path: held.extend(lock.locked() for lock in locks))
    storage.prefetch(hashes)
    assert held == [False] * 4


def test_a_dry_run_says_what_would_happen_and_changes_nothing(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 3)
    storage.prefetch(hashes[:1])
    before = rig.counts()
    order = list(rig.cpu.hot_cache)
    result = storage.prefetch((*hashes, 7), dry_run=True)
    assert result.chunk_status == (THERE, LOADED, LOADED, MISSING)
    assert result.bytes_by_tier == {"disk": 2 * rig.chunk_bytes}
    assert result.reason is not None and "2 chunks" in result.reason
    assert "in about" in result.reason, "the first load has shown how fast this disk is"
    assert rig.counts() == before
    assert list(rig.cpu.hot_cache) == order


def test_the_head_of_a_prefetched_chain_is_its_youngest(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 4)
    storage.prefetch(hashes)
    assert [key.chunk_hash for key in rig.cpu.hot_cache] == list(reversed(hashes))


@pytest.mark.parametrize(
    "rig", [{"settings": {"local_cpu": False}}, {"settings": {"use_layerwise": True}}], indirect=True
)
def test_modes_that_are_not_operated_on_are_named(rig: Rig, storage: LMCacheStorage) -> None:
    for result in (storage.prefetch((1,)), storage.evict((1,)), storage.locate((1,))):
        assert result.state is State.REJECTED
        assert result.chunk_status == (ChunkStatus.UNSUPPORTED,)
        assert result.reason is not None and "not supported" in result.reason


def test_an_unknown_tier_is_refused(rig: Rig, storage: LMCacheStorage) -> None:
    result = storage.prefetch((1,), tier=Tier.DEVICE)
    assert result.state is State.REJECTED
    assert result.reason is not None and "device" in result.reason


@pytest.mark.parametrize(
    ("rig", "direct"),
    [({"extra": {"use_odirect": True}}, True), ({}, False)],
    indirect=["rig"],
    ids=["configured", "not configured"],
)
def test_direct_io_is_used_where_it_is_configured(rig: Rig, storage: LMCacheStorage, direct: bool) -> None:
    hashes = on_disk(rig, 2)
    paths = [meta.path for meta in rig.disk.dict.values()]
    for path in paths:
        forget(path)
    if any(map(pages_cached, paths)):
        pytest.skip("this file system keeps what it is told to forget")
    assert storage.prefetch(hashes).state is State.SUCCEEDED
    assert [pages_cached(path) == 0 for path in paths] == [direct] * 2
    rig.check()
    bytes_agree(rig)
