# SPDX-License-Identifier: Apache-2.0
"""For each patch on LMCache's storage what must hold on a real engine. Each raises where it does not.

`SCENARIOS` maps a scenario to the patch (or, where either would do, the patches) without which it fails, and to how it
fails then: another failure would show something else.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from semkv.consumers.storage import files
from tests.support.lmcache_engine import HEAD_SIZE, HEADS, LAYERS, Rig, assert_lock_free

SECONDS = 5.0


def on_loop(rig: Rig, work: Coroutine[Any, Any, Any]) -> Any:
    """Run on LMCache's storage loop."""
    return asyncio.run_coroutine_threadsafe(work, rig.manager.loop).result(SECONDS)


def release(objects: list[Any]) -> None:
    for obj in objects:
        obj.ref_count_down()


def stored(rig: Rig, chunks: int) -> list[int]:
    """A prompt of so many chunks, stored in both tiers."""
    tokens = rig.tokens(chunks)
    rig.store(tokens)
    return tokens


def on_disk(rig: Rig, chunks: int) -> list[int]:
    """One that only the disk has."""
    tokens = stored(rig, chunks)
    rig.drop_from_ddr(tokens)
    return tokens


def skipped_chunks_stay_valid(rig: Rig) -> None:
    tokens = stored(rig, 4)
    for _ in range(2):
        assert rig.serve(tokens, skip_chunks=2) == 2 * rig.chunk_size
        rig.check()


def a_key_gone_before_the_load_leaves_the_lock_free(rig: Rig) -> None:
    tokens = stored(rig, 3)
    keys = rig.keys(tokens)
    rig.disk.remove(keys[1])
    loaded = on_loop(rig, rig.disk.batched_get_non_blocking("x", keys))
    assert len(loaded) == 1
    release(loaded)
    rig.check()


def no_memory_for_the_load_leaves_the_lock_free(rig: Rig) -> None:
    tokens = on_disk(rig, 3)
    held = rig.pin_pool()
    try:
        assert on_loop(rig, rig.disk.batched_get_non_blocking("x", rig.keys(tokens))) == []
        assert_lock_free(rig.disk.disk_lock, "disk_lock")
    finally:
        release(held)
    rig.check()


def a_short_file_is_not_handed_out_by_a_lookup(rig: Rig) -> None:
    tokens = on_disk(rig, 3)
    os.truncate(rig.disk.dict[rig.keys(tokens)[1]].path, 100)
    request = rig.lookup(tokens)
    assert rig.hit_tokens(request) == rig.chunk_size, "a chunk that was not read whole was promised"
    rig.retrieve(request, tokens)
    rig.check()


def a_chunk_gone_from_ddr_before_the_load_costs_no_reference(rig: Rig) -> None:
    tokens = stored(rig, 3)
    keys = rig.keys(tokens)
    rig.cpu.remove(keys[1])
    loaded = on_loop(rig, rig.cpu.batched_get_non_blocking("x", keys))
    assert len(loaded) == 1
    release(loaded)
    rig.check()


def a_lookup_gives_back_its_disk_pins(rig: Rig) -> None:
    tokens = on_disk(rig, 3)
    request = rig.lookup(tokens)
    rig.retrieve(request, tokens)
    assert all(meta.pin_count == 0 for meta in rig.disk.dict.values()), "disk entries stay pinned"
    rig.check()


def one_tiers_failure_loses_no_others_objects(rig: Rig) -> None:
    tokens = stored(rig, 4)
    rig.drop_from_ddr(tokens[2 * rig.chunk_size :])
    for key in rig.keys(tokens)[2:]:
        with rig.cpu.cpu_lock:
            if key in rig.cpu.hot_cache:
                rig.cpu.remove(key, force=False)

    async def broken(*_args: Any, **_kwargs: Any) -> list[Any]:
        raise OSError("disk on fire")

    rig.disk.batched_get_non_blocking = broken
    request = rig.lookup(tokens)
    del rig.disk.batched_get_non_blocking
    assert rig.hit_tokens(request) == 2 * rig.chunk_size, "the other tier's chunks are lost"
    rig.retrieve(request, tokens)
    rig.check()


def a_gap_between_tiers_is_answered(rig: Rig) -> None:
    tokens = stored(rig, 3)
    with rig.cpu.cpu_lock:
        rig.cpu.remove(rig.keys(tokens)[2], force=False)
    real = rig.cpu.batched_get_non_blocking

    async def one_fewer(lookup_id: str, keys: list[Any], spec: Any = None) -> list[Any]:
        loaded = await real(lookup_id, keys, spec)
        release(loaded[1:])
        return list(loaded[:1])

    rig.cpu.batched_get_non_blocking = one_fewer
    request = rig.lookup(tokens, wait=False)
    rig.wait_for(lambda: request in rig.replies.tokens, "the answer", SECONDS)
    del rig.cpu.batched_get_non_blocking
    assert rig.hit_tokens(request) == rig.chunk_size
    rig.retrieve(request, tokens)
    rig.check()


def what_a_lookup_loaded_is_hot_afterwards(rig: Rig) -> None:
    tokens = rig.tokens(3)
    hashes = rig.store(tokens)
    rig.drop_from_ddr(tokens)
    request = rig.lookup(tokens)
    assert rig.retrieve(request, tokens) == 3 * rig.chunk_size
    assert set(rig.counts()["hot"]) == set(hashes), "what was loaded is not kept"
    rig.check()


def a_hit_refreshes_with_the_prefix_youngest(rig: Rig) -> None:
    old, new = rig.tokens(2), rig.tokens(2, seed=1)
    hashes = rig.store(old)
    rig.store(new)
    request = rig.lookup(old)
    rig.retrieve(request, old)
    assert [key.chunk_hash for key in rig.cpu.hot_cache][-2:] == [hashes[1], hashes[0]]
    assert not rig.cpu.keys_in_request, "keys to touch pile up"


def touching_tolerates_what_has_gone(rig: Rig) -> None:
    tokens = stored(rig, 2)
    keys = rig.keys(tokens)
    rig.cpu.keys_in_request = list(keys)
    rig.cpu.remove(keys[0])
    rig.cpu.touch_cache()
    assert not rig.cpu.keys_in_request


def storing_again_counts_quota_once(rig: Rig) -> None:
    tokens = rig.tokens(4)
    for _ in range(3):
        rig.store(tokens)
        rig.drop_from_ddr(tokens)
    assert rig.disk.current_cache_size == 4 * rig.chunk_bytes, "quota is counted again"
    rig.check()


def a_write_that_fails_keeps_nothing(rig: Rig) -> None:
    shutil.rmtree(rig.disk.path)
    rig.store(rig.tokens(2), settle=False)
    rig.wait_for(lambda: not rig.disk.disk_worker.put_tasks, "the failed writes to end", SECONDS)
    Path(rig.disk.path).mkdir()
    assert rig.disk.current_cache_size == rig.disk.usage == 0
    rig.check()


def a_full_disk_of_pinned_chunks_refuses_and_keeps_nothing(rig: Rig) -> None:
    seeds = range(1, 9)
    for seed in seeds:
        rig.store(rig.tokens(8, seed=seed))
    for meta in rig.disk.dict.values():
        meta.pin()
    rig.store(rig.tokens(2), settle=False)
    rig.wait_for(lambda: not rig.disk.disk_worker.put_tasks, "the refused writes to end", SECONDS)
    for meta in rig.disk.dict.values():
        meta.unpin()
    rig.check()


def a_missing_file_does_not_raise_while_storing(rig: Rig) -> None:
    for seed in range(1, 9):
        rig.store(rig.tokens(8, seed=seed))
    for path in Path(rig.disk.path).iterdir():
        path.unlink()
    rig.store(rig.tokens(2))
    with rig.disk.disk_lock:
        assert rig.disk.usage == rig.disk.current_cache_size


def a_forced_removal_gives_the_quota_back(rig: Rig) -> None:
    tokens = stored(rig, 3)
    for key in rig.keys(tokens):
        assert rig.disk.remove(key)
    assert rig.disk.usage == 0
    assert rig.disk.current_cache_size == 0, "quota is not given back"
    rig.check()


def removing_a_chunk_whose_file_is_gone_does_not_raise(rig: Rig) -> None:
    tokens = stored(rig, 1)
    key = rig.keys(tokens)[0]
    Path(rig.disk.dict[key].path).unlink()
    assert rig.disk.remove(key)
    rig.check()


def a_blocking_read_of_a_short_file_gives_nothing(rig: Rig) -> None:
    tokens = on_disk(rig, 1)
    key = rig.keys(tokens)[0]
    os.truncate(rig.disk.dict[key].path, 100)
    assert rig.disk.get_blocking(key) is None, "an unread buffer is handed out"
    rig.check()


def waiting_for_memory_never_stops_the_loop(rig: Rig) -> None:
    held = rig.pin_pool()
    shape = torch.Size([2, LAYERS, rig.chunk_size, HEADS * HEAD_SIZE])

    async def allocate() -> Any:
        return rig.cpu.allocate(shape, torch.float32)

    future = asyncio.run_coroutine_threadsafe(allocate(), rig.manager.loop)
    try:
        obj = future.result(SECONDS)
    except FutureTimeoutError:
        release(held)
        future.result(SECONDS).ref_count_down()
        raise
    assert obj is None
    release(held)


def what_can_never_fit_evicts_nothing(rig: Rig) -> None:
    rig.store(rig.tokens(4))
    shape = torch.Size([2, LAYERS, rig.chunk_size * 100, HEADS * HEAD_SIZE])
    assert rig.cpu.allocate(shape, torch.float32, busy_loop=False) is None
    assert len(rig.cpu.hot_cache) == 4, "chunks went for what cannot fit"


def a_hit_on_disk_refreshes_with_the_prefix_youngest(rig: Rig) -> None:
    old, new = rig.tokens(2), rig.tokens(2, seed=1)
    hashes = rig.store(old)
    rig.store(new)
    rig.drop_from_ddr(old)
    request = rig.lookup(old)
    rig.retrieve(request, old)
    assert [key.chunk_hash for key in rig.disk.dict][-2:] == [hashes[1], hashes[0]], "the prefix would go first"
    assert not rig.disk.keys_in_request, "keys to touch pile up"


def touching_on_disk_tolerates_what_has_gone(rig: Rig) -> None:
    tokens = stored(rig, 2)
    keys = rig.keys(tokens)
    rig.disk.keys_in_request = list(keys)
    rig.disk.remove(keys[0])
    rig.disk.touch_cache()
    assert not rig.disk.keys_in_request


def waiting_for_many_never_stops_the_loop(rig: Rig) -> None:
    held = rig.pin_pool()
    shape = torch.Size([2, LAYERS, rig.chunk_size, HEADS * HEAD_SIZE])

    async def allocate() -> Any:
        return rig.cpu.batched_allocate(shape, torch.float32, 2)

    future = asyncio.run_coroutine_threadsafe(allocate(), rig.manager.loop)
    try:
        assert future.result(SECONDS) is None
    except FutureTimeoutError:
        release(held)
        held = future.result(SECONDS)
        raise
    finally:
        release(held)


def chunks_lie_so_that_direct_reads_reach_them(rig: Rig) -> None:
    tokens = stored(rig, 2)
    for key in rig.keys(tokens):
        assert files.direct_possible(rig.cpu.hot_cache[key].byte_array), "not on a page boundary"


@dataclass(frozen=True)
class Fails:
    """Without which patches a scenario fails, and how; `options` are the engine's."""

    without: str
    error: type[BaseException]
    words: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


SCENARIOS: dict[Callable[[Rig], None], Fails] = {
    skipped_chunks_stay_valid: Fails("single_release", AssertionError, "ref 0, pin 0, valid False"),
    a_key_gone_before_the_load_leaves_the_lock_free: Fails("disk_load", AssertionError, "not found in disk cache"),
    no_memory_for_the_load_leaves_the_lock_free: Fails("disk_load", AssertionError, "disk_lock is still held"),
    a_short_file_is_not_handed_out_by_a_lookup: Fails("disk_load", AssertionError, "not read whole was promised"),
    a_hit_on_disk_refreshes_with_the_prefix_youngest: Fails("disk_load", AssertionError, "prefix would go first"),
    a_chunk_gone_from_ddr_before_the_load_costs_no_reference: Fails("cpu_load", KeyError, "CacheEngineKey"),
    a_lookup_gives_back_its_disk_pins: Fails("selective_unpin", AssertionError, "disk entries stay pinned"),
    one_tiers_failure_loses_no_others_objects: Fails("selective_unpin", AssertionError, "other tier's chunks are lost"),
    a_gap_between_tiers_is_answered: Fails("completion", TimeoutError, "the answer"),
    what_a_lookup_loaded_is_hot_afterwards: Fails("warm_hot_cache", AssertionError, "what was loaded is not kept"),
    a_hit_refreshes_with_the_prefix_youngest: Fails("touch", AssertionError, "keys to touch pile up"),
    touching_tolerates_what_has_gone: Fails("touch", KeyError, "CacheEngineKey"),
    touching_on_disk_tolerates_what_has_gone: Fails("touch", KeyError, "CacheEngineKey"),
    storing_again_counts_quota_once: Fails("disk_put", AssertionError, "quota is counted again"),
    a_write_that_fails_keeps_nothing: Fails("disk_put", TimeoutError, "the failed writes to end"),
    a_full_disk_of_pinned_chunks_refuses_and_keeps_nothing: Fails(
        "disk_put", TimeoutError, "the refused writes to end"
    ),
    a_missing_file_does_not_raise_while_storing: Fails("disk_put disk_remove", FileNotFoundError),
    a_forced_removal_gives_the_quota_back: Fails("disk_remove", AssertionError, "quota is not given back"),
    removing_a_chunk_whose_file_is_gone_does_not_raise: Fails("disk_remove", FileNotFoundError),
    a_blocking_read_of_a_short_file_gives_nothing: Fails("disk_read", AssertionError, "unread buffer is handed out"),
    waiting_for_memory_never_stops_the_loop: Fails("allocation", FutureTimeoutError),
    waiting_for_many_never_stops_the_loop: Fails("allocation", FutureTimeoutError),
    what_can_never_fit_evicts_nothing: Fails("allocation", AssertionError, "chunks went for what cannot fit"),
    # A pool of that size never comes from the heap, where its address would be a matter of chance.
    chunks_lie_so_that_direct_reads_reach_them: Fails(
        "aligned_pool", AssertionError, "not on a page boundary", {"pool_chunks": 8192}
    ),
}
