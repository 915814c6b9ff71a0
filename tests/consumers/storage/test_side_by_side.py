# SPDX-License-Identifier: Apache-2.0
"""Reads side by side: within one prefetch, of two that overlap, and what is left when one of them goes wrong."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, Order, State
from semkv.consumers.storage import hot
from semkv.consumers.storage.latch import Latch
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control
from semkv.consumers.storage.readers import READERS
from tests.consumers.storage.chunks import bytes_agree, on_disk
from tests.consumers.storage.reads import around_reads
from tests.support.lmcache_engine import Rig

LOADED, FAILED, NOT_TRIED = ChunkStatus.LOADED, ChunkStatus.FAILED, ChunkStatus.NOT_TRIED


def test_overlapping_prefetches_read_each_chunk_once(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 4)
    reads: list[str] = []
    first_read, go_on = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        reads.append(path)
        first_read.set()
        assert go_on.wait(20)

    around_reads(monkeypatch, slow)
    results = {}
    threads = [
        threading.Thread(target=lambda name=name: results.update({name: storage.prefetch(hashes)})) for name in "ab"
    ]
    threads[0].start()
    assert first_read.wait(20)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(reads) == 4
    assert results["a"].state is State.SUCCEEDED
    assert results["b"].state is State.SUCCEEDED
    rig.check()


def test_chunks_are_read_side_by_side_and_counted_in_order(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 6)
    together = threading.Barrier(READERS, timeout=20)
    around_reads(monkeypatch, lambda path: together.wait())  # returns only if as many reads are under way at once
    assert storage.prefetch(hashes).chunk_status == (LOADED,) * 6
    assert [thread.name for thread in threading.enumerate() if thread.name == "semkv-read"] == []
    rig.check()
    bytes_agree(rig)


def test_what_was_read_behind_a_chunk_that_failed_is_not_registered(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 6)
    bad = Path(rig.disk.dict[rig.keys(rig.tokens(6))[1]].path)
    os.truncate(bad, 100)
    next_one = rig.disk.dict[rig.keys(rig.tokens(6))[2]].path
    behind = threading.Event()

    def bad_one_last(path: str) -> None:
        if path == str(bad):
            assert behind.wait(20)

    around_reads(monkeypatch, bad_one_last, lambda path: behind.set() if path == next_one else None)
    result = storage.prefetch(hashes)
    assert result.chunk_status == (LOADED, FAILED, NOT_TRIED, NOT_TRIED, NOT_TRIED, NOT_TRIED)
    assert set(rig.counts()["hot"]) == {hashes[0]}
    rig.check()


def test_opposite_orders_over_the_same_chunks_never_wait_for_each_other(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 6)
    real = storage.inflight.begin
    claims: dict[int, int] = {}
    both_have_three = threading.Barrier(2, timeout=20)

    def begin(chunk_hash: int) -> Latch | None:
        me = threading.get_ident()
        claims[me] = claims.get(me, 0) + 1
        if claims[me] == 4:
            both_have_three.wait()  # the next chunk of each is one that the other has claimed
        return real(chunk_hash)

    monkeypatch.setattr(storage.inflight, "begin", begin)
    results = []
    threads = [
        threading.Thread(
            target=lambda asked=asked: results.append(
                storage.prefetch(asked, order=Order.SET, control=Control(time.monotonic_ns() + 20 * 10**9))
            )
        )
        for asked in (hashes, tuple(reversed(hashes)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.state for result in results] == [State.SUCCEEDED] * 2, (
        "each waits for the other until its time is up"
    )
    assert results[0].counts.get("loaded", 0) + results[1].counts.get("loaded", 0) == 6, "each chunk was read once"
    rig.check()


def test_a_bug_on_the_way_leaves_nothing_held(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 8)
    real = hot.register
    calls = []

    def broken(backend: object, key: object, memory_obj: object) -> object:
        calls.append(key)
        if len(calls) == 3:
            raise RuntimeError("a bug")
        return real(backend, key, memory_obj)

    monkeypatch.setattr(hot, "register", broken)
    result = storage.prefetch(hashes)
    assert result.state is State.FAILED
    assert result.reason == "RuntimeError: a bug"
    assert not storage.inflight.pending(hashes)
    rig.check()
    monkeypatch.undo()
    assert storage.prefetch(hashes).state is State.SUCCEEDED
