# SPDX-License-Identifier: Apache-2.0
"""What a prefetch promises while others change the caches under it: each change happens during one of its reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, Order, State
from semkv.consumers.storage import files
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control
from tests.consumers.storage.chunks import on_disk
from tests.consumers.storage.reads import around_reads
from tests.support.lmcache_engine import PagedStandIn, Rig, checksum
from tests.support.page_cache import ENDS_EARLY, Requests

LOADED, THERE, MISSING = ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE, ChunkStatus.MISSING
FAILED, NOT_TRIED = ChunkStatus.FAILED, ChunkStatus.NOT_TRIED


def during_the_read_of(rig: Rig, chunk: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Do `work` in the middle of a prefetch: before this chunk of the rig's prompt is read."""
    path = rig.disk.dict[rig.keys(rig.tokens(chunk + 1))[chunk]].path
    around_reads(monkeypatch, lambda asked: work() if asked == path else None)


def test_what_is_held_is_referenced_and_never_pinned(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 3)
    storage.prefetch(hashes[:1])
    seen: list[tuple[int, int]] = []

    def look() -> None:
        obj = rig.cpu.hot_cache[rig.keys(rig.tokens(1))[0]]
        seen.append((obj.get_ref_count(), obj.metadata.pin_count))

    during_the_read_of(rig, 2, monkeypatch, look)
    assert storage.prefetch(hashes).chunk_status == (THERE, LOADED, LOADED)
    assert seen == [(2, 0)], "LMCache's pin monitor gives pins away after 300 s"
    rig.check()


def test_a_hot_entry_whose_memory_is_freed_is_dropped_and_loaded_anew(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    dead = rig.cpu.hot_cache[rig.keys(tokens)[0]]
    dead.ref_count_down()  # as a double release would
    assert not dead.is_valid()
    assert storage.locate(hashes).chunk_tiers[0] == ("disk",)
    assert storage.prefetch(hashes, dry_run=True).chunk_status == (LOADED, THERE)
    assert storage.prefetch(hashes).chunk_status == (LOADED, THERE)
    rig.check()


def test_the_entry_that_was_pinned_is_the_one_that_is_unpinned(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 1)
    key = rig.keys(rig.tokens(1))[0]
    before = rig.disk.dict[key]
    after = dataclasses.replace(before, pin_count=0)
    pins: list[int] = []

    def replace() -> None:
        pins.append(before.pin_count)
        with rig.disk.disk_lock:
            rig.disk.dict[key] = after
            after.pin()  # another's pin, of the new entry

    during_the_read_of(rig, 0, monkeypatch, replace)
    assert storage.prefetch(hashes).chunk_status == (LOADED,)
    assert pins == [1], "it could not be evicted while it was read"
    assert (before.pin_count, after.pin_count) == (0, 1)
    after.unpin()
    rig.check()


def test_the_object_that_was_faster_is_the_one_that_counts(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 2)
    tokens = rig.tokens(2)
    key = rig.keys(tokens)[0]

    def overtake() -> None:
        obj = rig.cpu.allocate(rig.device.get_shape(rig.chunk_size), rig.engine.metadata.kv_dtype, busy_loop=False)
        PagedStandIn.fill(obj, 0, tokens[: rig.chunk_size])
        rig.cpu.submit_put_task(key, obj)
        obj.ref_count_down()

    during_the_read_of(rig, 0, monkeypatch, overtake)
    result = storage.prefetch(hashes, budget_bytes=rig.chunk_bytes)
    assert result.chunk_status == (THERE, LOADED), "what others brought is not of this budget"
    assert result.bytes_by_tier == {"disk": rig.chunk_bytes}
    rig.check()


def test_what_goes_before_the_end_is_not_reported(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 3)
    storage.prefetch(hashes[:1])
    key = rig.keys(rig.tokens(1))[0]
    during_the_read_of(rig, 2, monkeypatch, lambda: rig.cpu.remove(key, force=True))  # as LMCache's own clear does
    result = storage.prefetch(hashes)
    assert result.chunk_status == (MISSING, LOADED, LOADED)
    assert result.usable_prefix == 0
    assert result.state is State.PARTIAL
    rig.check()


def test_expiry_on_the_way_says_how_many_were_loaded(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 8)
    control = Control(time.monotonic_ns() + 10**12)

    def expire() -> None:
        control.deadline_ns = 0

    during_the_read_of(rig, 2, monkeypatch, expire)
    result = storage.prefetch(hashes, control=control)
    assert result.state is State.EXPIRED
    loaded = result.usable_prefix
    assert 3 <= loaded <= 4, "reads that had begun are counted"
    assert result.chunk_status == (LOADED,) * loaded + (NOT_TRIED,) * (8 - loaded)
    assert result.reason == f"expired after {loaded} of 8 chunks"
    rig.check()


def test_a_chunk_is_read_in_one_request_and_no_byte_twice(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 1)
    with Requests() as asked:  # one chunk is read by the thread that asks for it
        assert storage.prefetch(hashes).chunk_status == (LOADED,)
    assert (asked.calls, asked.bytes) == (1, rig.chunk_bytes)


def test_a_chunk_is_read_straight_into_its_memory(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 2)
    filled: list[int] = []
    real = files._read_file

    def read_file(path: str, buffer: memoryview, skip: int, direct: bool, at_once: int) -> tuple[int, int]:
        filled.append(files.address_of(buffer))
        return real(path, buffer, skip, direct, at_once)

    monkeypatch.setattr(files, "_read_file", read_file)
    storage.prefetch(hashes)
    assert sorted(filled) == sorted(rig.cpu.hot_cache[key].data_ptr for key in rig.keys(rig.tokens(2)))


def test_a_read_that_comes_in_pieces_goes_on(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 1)
    monkeypatch.setattr(files, "REQUEST_BYTES", 1000)
    with Requests() as asked:
        assert storage.prefetch(hashes).chunk_status == (LOADED,)
    assert (asked.calls, asked.bytes) == (-(-rig.chunk_bytes // 1000), rig.chunk_bytes)
    key = rig.keys(rig.tokens(1))[0]
    assert bytes(rig.cpu.hot_cache[key].byte_array) == Path(rig.disk.dict[key].path).read_bytes()


@pytest.mark.skipif(not Path(ENDS_EARLY).exists(), reason="needs sysfs")
@pytest.mark.parametrize("rig", [{"chunk_size": 8}], indirect=True)
def test_a_read_that_ends_early_fails(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 2)
    path = Path(rig.disk.dict[rig.keys(rig.tokens(2))[1]].path)
    path.unlink()
    path.symlink_to(ENDS_EARLY)  # has a page of bytes, as the chunk has, and gives two
    result = storage.prefetch(hashes)
    assert result.chunk_status == (LOADED, FAILED)
    assert result.reason is not None and "ended after 2 of 4096 bytes" in result.reason
    rig.check()


def test_progress_can_be_followed(rig: Rig, storage: LMCacheStorage) -> None:
    hashes = on_disk(rig, 3)
    control = Control()
    storage.prefetch((*hashes, 7), order=Order.SET, control=control)
    assert (control.chunks_done, control.bytes_done) == (4, 3 * rig.chunk_bytes)


def test_a_store_beside_a_prefetch_takes_no_harm(
    rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = on_disk(rig, 4)
    other = rig.tokens(6, seed=5)
    during_the_read_of(rig, 1, monkeypatch, lambda: rig.store(other, settle=False) and None)
    assert storage.prefetch(hashes).chunk_status == (LOADED,) * 4
    rig.check()
    for tokens in (rig.tokens(4), other):
        for index, key in enumerate(rig.keys(tokens)):
            if key in rig.cpu.hot_cache:
                expected = rig.cpu.allocate(rig.device.get_shape(rig.chunk_size), rig.engine.metadata.kv_dtype)
                PagedStandIn.fill(expected, 0, tokens[: (index + 1) * rig.chunk_size])
                assert checksum(rig.cpu.hot_cache[key]) == checksum(expected)
                expected.ref_count_down()


def test_a_command_named_like_a_live_request_changes_nothing_of_it(rig: Rig, storage: LMCacheStorage) -> None:
    live = rig.tokens(3, seed=1)
    rig.store(live)
    hashes = on_disk(rig, 4)
    request = rig.lookup(live, request="turn")
    assert storage.prefetch(hashes, control=Control(command_id="turn")).chunk_status == (LOADED,) * 4
    assert storage.evict(hashes, control=Control(command_id="turn")).state is State.SUCCEEDED
    assert rig.hit_tokens(request) == len(live)
    assert rig.retrieve(request, live) == len(live)
    rig.check()
