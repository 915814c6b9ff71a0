# SPDX-License-Identifier: Apache-2.0
"""Evict on a real engine: per tier, in use, in flight, missing, shared, quota."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, State, Tier
from semkv.consumers.storage import evict, files
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control
from tests.consumers.storage.nobody import Nobody
from tests.support.lmcache_engine import Rig

REMOVED, ABSENT, IN_USE = ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.IN_USE


def test_from_ddr_only_frees_ddr_and_leaves_the_file(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(4)
    hashes = rig.store(tokens)
    before = rig.counts()["allocations"]
    result = storage.evict(hashes, tiers=(Tier.CPU,))
    assert result.state is State.SUCCEEDED
    assert result.chunk_status == (REMOVED,) * 4
    assert result.bytes_by_tier == {"cpu": 4 * rig.chunk_bytes}
    assert rig.counts()["allocations"] == before - 4
    assert set(rig.counts()["disk"]) == set(hashes)
    rig.check()
    assert rig.hit_tokens(rig.lookup(tokens)) == 4 * rig.chunk_size, "the next lookup hits the disk"


def test_by_default_both_local_tiers_go(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(4))
    assert storage.evict(hashes).chunk_status == (REMOVED,) * 4
    state = rig.counts()
    assert (state["hot"], state["disk"], state["files"]) == ({}, {}, {})
    assert storage.evict(hashes).chunk_status == (ABSENT,) * 4
    rig.check()


def test_from_disk_only_leaves_ddr(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(2))
    assert storage.evict(hashes, tiers=(Tier.DISK,)).bytes_by_tier == {"disk": 2 * rig.chunk_bytes}
    assert set(rig.counts()["hot"]) == set(hashes)
    rig.check()


def test_what_a_request_uses_is_in_use_and_stays_readable(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(3)
    hashes = rig.store(tokens)
    request = rig.lookup(tokens[: rig.chunk_size])
    result = storage.evict(hashes, tiers=(Tier.CPU,))
    assert result.chunk_status == (IN_USE, REMOVED, REMOVED)
    assert result.state is State.PARTIAL
    assert rig.retrieve(request, tokens[: rig.chunk_size]) == rig.chunk_size
    rig.check()
    assert storage.evict(hashes, tiers=(Tier.CPU,)).chunk_status == (REMOVED, ABSENT, ABSENT)
    rig.check()


def test_a_pinned_disk_entry_is_in_use(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(1)
    hashes = rig.store(tokens)
    key = rig.keys(tokens)[0]
    rig.disk.pin(key)
    assert storage.evict(hashes, tiers=(Tier.DISK,)).chunk_status == (IN_USE,)
    rig.disk.unpin(key)
    assert storage.evict(hashes, tiers=(Tier.DISK,)).chunk_status == (REMOVED,)
    rig.check()


def test_a_missing_file_is_absent_and_its_quota_comes_back(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    Path(rig.disk.dict[rig.keys(tokens)[0]].path).unlink()
    assert storage.evict(hashes, tiers=(Tier.DISK,)).chunk_status == (ABSENT, REMOVED)
    assert rig.disk.usage == rig.disk.current_cache_size == 0
    rig.check()


def test_a_write_on_its_way_is_waited_for_and_never_comes_back(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = files.write_full

    def slow(*args: object, **kwargs: object) -> int:
        started.set()
        assert go_on.wait(20)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write_full", slow)
    monkeypatch.setattr(evict, "_PUT_WAIT_S", 20.0)
    hashes = rig.store(rig.tokens(1), settle=False)
    assert started.wait(20)
    results = []
    thread = threading.Thread(target=lambda: results.append(storage.evict(hashes)))
    thread.start()
    go_on.set()
    thread.join(20)
    assert results[0].chunk_status == (REMOVED,)
    rig.check()
    state = rig.counts()
    assert (state["hot"], state["disk"], state["files"]) == ({}, {}, {})


def test_a_write_that_does_not_land_in_time_is_in_use(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = files.write_full

    def stuck(*args: object, **kwargs: object) -> int:
        started.set()
        assert go_on.wait(20)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write_full", stuck)
    monkeypatch.setattr(evict, "_PUT_WAIT_S", 0.02)
    hashes = rig.store(rig.tokens(1), settle=False)
    assert started.wait(20)
    assert storage.evict(hashes).chunk_status == (IN_USE,)
    go_on.set()
    rig.check()
    assert storage.evict(hashes).chunk_status == (REMOVED,)


def test_shared_chunks_stay_unless_forced(rig: Rig) -> None:
    forest = Nobody()
    storage = LMCacheStorage(rig.engine, forest)
    hashes = rig.store(rig.tokens(3))
    forest.alive.add(hashes[0])
    result = storage.evict(hashes)
    assert result.chunk_status == (ChunkStatus.SHARED, REMOVED, REMOVED)
    assert result.state is State.PARTIAL
    assert storage.evict(hashes, force=True).chunk_status == (REMOVED, ABSENT, ABSENT)
    rig.check()


def test_another_tenants_chunk_is_absent_everywhere(rig: Rig) -> None:
    forest = Nobody()
    storage = LMCacheStorage(rig.engine, forest)
    hashes = rig.store(rig.tokens(2))
    forest.hidden.update(hashes)
    for dry_run in (False, True):
        assert storage.evict(hashes, dry_run=dry_run, force=True).chunk_status == (ABSENT, ABSENT)
        assert storage.prefetch(hashes, dry_run=dry_run).chunk_status[0] is ChunkStatus.MISSING
    assert storage.locate(hashes).chunk_tiers == ((), ())
    assert set(rig.counts()["hot"]) == set(hashes)


def test_ten_times_fill_and_evict_leaves_quota_and_files_equal(rig: Rig, storage: LMCacheStorage) -> None:
    for round_number in range(10):
        hashes: list[int] = []
        for part in range(8):
            hashes += rig.store(rig.tokens(8, seed=round_number * 100 + part + 1))
        assert len(rig.counts()["disk"]) == 64, "the disk is full"
        counts = storage.evict(tuple(hashes)).counts
        assert counts == {"removed": 64}
        assert rig.disk.usage == rig.disk.current_cache_size == 0
        assert rig.counts()["files"] == {}
    rig.check()


def test_a_dry_run_removes_nothing(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(2))
    before = rig.counts()
    result = storage.evict((*hashes, 5), dry_run=True)
    assert result.chunk_status == (REMOVED, REMOVED, ABSENT)
    assert result.bytes_by_tier == {"cpu": 2 * rig.chunk_bytes, "disk": 2 * rig.chunk_bytes}
    assert rig.counts() == before


def test_cancelled_before_it_began(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(2))
    control = Control()
    control.cancel()
    result = storage.evict(hashes, control=control)
    assert result.state is State.CANCELLED
    assert result.chunk_status == (ChunkStatus.NOT_TRIED,) * 2
    rig.check()


def test_the_remote_tier_needs_force(rig: Rig, storage: LMCacheStorage) -> None:
    result = storage.evict((1,), tiers=(Tier.REMOTE,))
    assert result.state is State.REJECTED
    assert result.reason is not None and "force" in result.reason


def test_locate_and_tiers_tell_what_is_where(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(3))
    storage.evict((hashes[1],), tiers=(Tier.CPU,))
    storage.evict((hashes[2],))
    result = storage.locate((*hashes, 9))
    assert result.chunk_tiers == ((Tier.CPU, Tier.DISK), (Tier.DISK,), (), ())
    assert result.usable_prefix == 2
    cpu, disk = storage.tiers()
    assert (cpu.name, cpu.chunks, cpu.used_bytes) == ("cpu", 1, rig.chunk_bytes)
    assert (disk.name, disk.chunks, disk.used_bytes) == ("disk", 2, 2 * rig.chunk_bytes)


def test_frozen_and_bypassed_backends_are_skipped(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(1))
    storage.evict(hashes, tiers=(Tier.CPU,))
    rig.manager.set_freeze(True)
    assert storage.prefetch(hashes).chunk_status == (ChunkStatus.MISSING,)
    rig.manager.set_freeze(False)
    rig.manager.set_backend_bypass("LocalDiskBackend", True)
    assert storage.evict(hashes).chunk_status == (ABSENT,)
    rig.manager.set_backend_bypass("LocalDiskBackend", False)
    assert storage.prefetch(hashes).chunk_status == (ChunkStatus.LOADED,)
    rig.check()


class OtherBackendStandIn:
    """Stands in for a storage backend that semkv does not operate on."""

    def __str__(self) -> str:
        return "GdsBackend"


def test_a_backend_that_is_not_operated_on_is_named_while_the_others_are_done(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = rig.store(rig.tokens(2))
    monkeypatch.setitem(rig.manager.storage_backends, "GdsBackend", OtherBackendStandIn())
    result = storage.evict(hashes)
    assert result.chunk_status == (ChunkStatus.UNSUPPORTED,) * 2
    assert result.reason == "GdsBackend is not operated on"
    assert result.bytes_by_tier == {"cpu": 2 * rig.chunk_bytes, "disk": 2 * rig.chunk_bytes}
    monkeypatch.undo()
    assert storage.locate(hashes).chunk_tiers == ((), ())
    rig.check()


class ControllerStandIn:
    """Stands in for what tells LMCache's controller: keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []

    def add_kv_op(self, op_type: object, key: int) -> None:
        self.messages.append((str(getattr(op_type, "name", op_type)), key))


def test_lmcaches_controller_is_told_what_left_each_tier(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = rig.store(rig.tokens(2))
    told = {backend: ControllerStandIn() for backend in (rig.cpu, rig.disk)}
    for backend, controller in told.items():
        monkeypatch.setattr(backend, "batched_msg_sender", controller)
    storage.evict(hashes)
    expected = [("EVICT", hashes[1]), ("EVICT", hashes[0])]
    assert [controller.messages for controller in told.values()] == [expected, expected]
    rig.check()


def test_ddr_is_really_free_again(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = rig.store(rig.tokens(16))
    shape = rig.device.get_shape(rig.chunk_size)
    dtype = rig.engine.metadata.kv_dtype
    assert rig.cpu.allocate(shape, dtype, eviction=False, busy_loop=False) is None, "the pool is full"
    storage.evict(hashes[12:], tiers=(Tier.CPU,))
    taken = [rig.cpu.allocate(shape, dtype, eviction=False, busy_loop=False) for _ in range(5)]
    assert [obj is not None for obj in taken] == [True] * 4 + [False]
    for obj in taken[:4]:
        obj.ref_count_down()
    rig.check()
