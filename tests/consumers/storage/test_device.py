# SPDX-License-Identifier: Apache-2.0
"""The device tier on a real LMCache engine: CPU memory is the device, the stage and everything else are real."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv.bus.status import ChunkStatus, Order, State, Tier
from semkv.consumers.storage.attribution import Attribution, Outcome
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control, OpResult
from semkv.native.connector.stage import DeviceStage, StagedConnector
from tests.consumers.storage.nobody import Nobody
from tests.support.lmcache_engine import Rig, checksum, lmcache_engine

LOADED, THERE, REMOVED = ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE, ChunkStatus.REMOVED
STEP = "kv.tier.load cpu→device"
COPIES = 4


class PagesInHostMemory:
    """The stand-in connector of the rig, which says where its pages are and notes the bytes that it is given."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.device = torch.device("cpu")
        self.given: list[tuple[bool, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connector, name)

    def register(self, _kv_caches: Any) -> int:
        return 0

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj in memory_objs:
            is_copy = type(memory_obj).__name__ == "DeviceCopy"
            data = bytes(memory_obj.raw_data.numpy().tobytes()) if is_copy else bytes(memory_obj.byte_array)
            self.given.append((is_copy, digest(data)))


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with lmcache_engine(tmp_path, **getattr(request, "param", {})) as made:
        made.engine.gpu_connector = StagedConnector(
            PagesInHostMemory(made.engine.gpu_connector), DeviceStage(COPIES * made.chunk_bytes)
        )
        made.engine.gpu_connector.register([])
        yield made


@pytest.fixture
def storage(rig: Rig) -> LMCacheStorage:
    return LMCacheStorage(rig.engine, Nobody())


def stage_of(rig: Rig) -> DeviceStage:
    stage: DeviceStage = rig.engine.gpu_connector.device_stage
    return stage


def given(rig: Rig) -> list[tuple[bool, str]]:
    found: list[tuple[bool, str]] = rig.engine.gpu_connector.connector.given
    return found


def tiers(storage: LMCacheStorage, hashes: tuple[int, ...]) -> list[list[str]]:
    return [[str(tier) for tier in found] for found in storage.locate(hashes).chunk_tiers]


def usage(storage: LMCacheStorage) -> tuple[int, int, int]:
    (tier,) = [tier for tier in storage.tiers() if tier.name == "device"]
    return tier.capacity_bytes, tier.used_bytes, tier.chunks


def steps(result: OpResult) -> dict[str, int]:
    return {step.name: int(step.attributes["kv.bytes"]) for step in result.steps}


def test_from_disk_over_ddr_to_the_device(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(3)
    hashes = rig.store(tokens)
    expected = [checksum(rig.cpu.hot_cache[key]) for key in rig.keys(tokens)]
    rig.drop_from_ddr(tokens)
    size = rig.chunk_bytes

    result = storage.prefetch(hashes, tier=Tier.DEVICE)
    assert (result.state, result.chunk_status, result.usable_prefix) == (State.SUCCEEDED, (LOADED,) * 3, 3)
    assert result.bytes_by_tier == {"disk": 3 * size, "device": 3 * size}
    assert steps(result) == {"kv.tier.load disk→cpu": 3 * size, STEP: 3 * size}
    assert tiers(storage, hashes) == [["device", "cpu", "disk"]] * 3
    assert usage(storage) == (COPIES * size, 3 * size, 3)
    rig.check()

    again = storage.prefetch(hashes, tier=Tier.DEVICE)
    assert (again.chunk_status, again.bytes_by_tier) == ((THERE,) * 3, {})
    request = rig.lookup(tokens)
    assert rig.retrieve(request, tokens) == len(tokens)
    assert given(rig) == [(True, data) for data in expected]
    rig.check()


def test_what_leaves_ddr_leaves_the_device(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(3)
    hashes = rig.store(tokens)
    storage.prefetch(hashes, tier=Tier.DEVICE)
    result = storage.evict(hashes[2:], tiers=(Tier.CPU,))
    assert (result.chunk_status, result.bytes_by_tier) == (
        (REMOVED,),
        {"cpu": rig.chunk_bytes, "device": rig.chunk_bytes},
    )
    assert usage(storage)[2] == 2
    rig.drop_from_ddr(tokens)  # as LMCache does under pressure, without a word
    assert usage(storage)[1:] == (0, 0)
    assert tiers(storage, hashes) == [["disk"]] * 3
    # Loaded again into the same memory, without the device: nothing of before is handed out.
    storage.prefetch(hashes)
    rig.retrieve(rig.lookup(tokens), tokens)
    assert [is_copy for is_copy, _ in given(rig)] == [False] * 3


def test_a_replaced_entry_has_no_copy(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(1)
    hashes = rig.store(tokens)
    storage.prefetch(hashes, tier=Tier.DEVICE)
    rig.drop_from_ddr(tokens)
    rig.store(tokens)
    assert tiers(storage, hashes) == [["cpu", "disk"]]
    assert storage.prefetch(hashes, tier=Tier.DEVICE).chunk_status == (LOADED,)


def test_evicting_the_device_leaves_ddr(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    storage.prefetch(hashes, tier=Tier.DEVICE)
    dry = storage.evict(hashes, tiers=(Tier.DEVICE,), dry_run=True)
    assert (dry.chunk_status, usage(storage)[2]) == ((REMOVED,) * 2, 2)
    result = storage.evict(hashes, tiers=(Tier.DEVICE,))
    assert (result.state, result.chunk_status) == (State.SUCCEEDED, (REMOVED,) * 2)
    assert result.bytes_by_tier == {"device": 2 * rig.chunk_bytes}
    assert storage.evict(hashes, tiers=(Tier.DEVICE,)).chunk_status == (ChunkStatus.ABSENT,) * 2
    assert tiers(storage, hashes) == [["cpu", "disk"]] * 2
    rig.check()


def test_evict_while_a_load_reads(rig: Rig, storage: LMCacheStorage) -> None:
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    storage.prefetch(hashes, tier=Tier.DEVICE)
    seen: list[Any] = []
    connector = rig.engine.gpu_connector.connector
    real = connector.batched_to_gpu

    def reading(*args: Any, **kwargs: Any) -> None:
        seen.append(storage.evict(hashes, tiers=(Tier.DEVICE,)).chunk_status)
        seen.append(storage.evict(hashes).chunk_status)
        real(*args, **kwargs)

    connector.batched_to_gpu = reading
    rig.retrieve(rig.lookup(tokens), tokens)
    assert seen == [(ChunkStatus.IN_USE,) * 2] * 2
    assert [is_copy for is_copy, _ in given(rig)] == [True, True]
    assert storage.evict(hashes, tiers=(Tier.CPU, Tier.DEVICE)).chunk_status == (REMOVED,) * 2
    assert usage(storage)[1:] == (0, 0)


def test_evict_while_a_prefetch_loads(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = rig.store(rig.tokens(3))
    stage = stage_of(rig)
    real, seen = stage._copy, []

    def copying(memory_obj: Any, size: int) -> Any:
        if len(seen) == 2:  # two copies are there, the third is under way
            for chunk in (hashes[:1], hashes[2:]):
                seen.append(storage.evict(chunk, tiers=(Tier.DEVICE,)).chunk_status[0])
            seen.append(storage.evict(hashes[:1], tiers=(Tier.DEVICE, Tier.CPU)).chunk_status[0])
        else:
            seen.append(None)
        return real(memory_obj, size)

    monkeypatch.setattr(stage, "_copy", copying)
    result = storage.prefetch(hashes, tier=Tier.DEVICE)
    # The first copy is in use by the prefetch, the third not there yet; out of DDR it takes its copy along.
    assert seen == [None, None, ChunkStatus.IN_USE, ChunkStatus.ABSENT, REMOVED]
    assert result.chunk_status == (ChunkStatus.MISSING, LOADED, LOADED)
    assert (result.state, result.usable_prefix) == (State.PARTIAL, 0)
    assert result.reason is not None and "left DDR again" in result.reason
    assert usage(storage)[2] == 2
    rig.check()


def test_a_prefetch_larger_than_the_stage(rig: Rig, storage: LMCacheStorage) -> None:
    other = rig.store(rig.tokens(2, seed=1))
    storage.prefetch(other, tier=Tier.DEVICE)
    hashes = rig.store(rig.tokens(6))
    dry = storage.prefetch(hashes, tier=Tier.DEVICE, dry_run=True)
    result = storage.prefetch(hashes, tier=Tier.DEVICE)
    expected = (LOADED,) * COPIES + (ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED)
    assert dry.chunk_status == result.chunk_status == expected
    assert dry.bytes_by_tier == result.bytes_by_tier == {"device": COPIES * rig.chunk_bytes}
    assert dry.reason is not None and "4 chunks" in dry.reason
    assert (result.state, result.usable_prefix) == (State.PARTIAL, COPIES)
    assert result.reason is not None and "SEMKV_DEVICE_STAGE_MIB" in result.reason
    assert usage(storage)[2] == COPIES
    assert tiers(storage, other) == [["cpu", "disk"]] * 2  # the longest unused made room
    part = storage.prefetch(other, tier=Tier.DEVICE, budget_bytes=rig.chunk_bytes)
    assert part.chunk_status == (LOADED, ChunkStatus.NOT_TRIED)
    assert part.reason is not None and "budget" in part.reason
    rig.check()


def test_a_gap_and_a_failing_copy(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = rig.store(rig.tokens(4))
    with_gap = (hashes[0], 12345, hashes[1])
    result = storage.prefetch(with_gap, tier=Tier.DEVICE)
    assert result.chunk_status == (LOADED, ChunkStatus.MISSING, ChunkStatus.UNREACHABLE)
    assert storage.prefetch(with_gap, tier=Tier.DEVICE, order=Order.SET).chunk_status == (
        THERE,
        ChunkStatus.MISSING,
        LOADED,
    )
    real = stage_of(rig)._copy

    left = [1, 1]

    def broken(memory_obj: Any, size: int) -> Any:
        if left:
            left.pop()
            raise RuntimeError("the device is lost")
        return real(memory_obj, size)

    monkeypatch.setattr(stage_of(rig), "_copy", broken)
    result = storage.prefetch(hashes, tier=Tier.DEVICE)
    assert result.chunk_status == (THERE, THERE, ChunkStatus.FAILED, ChunkStatus.NOT_TRIED)
    assert result.reason == "RuntimeError: the device is lost"
    result = storage.prefetch(hashes, tier=Tier.DEVICE, order=Order.SET)
    assert result.chunk_status == (THERE, THERE, ChunkStatus.FAILED, LOADED)
    rig.check()


def test_cancel_and_expiry_between_copies(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = rig.store(rig.tokens(3))
    stage, control = stage_of(rig), Control()
    real = stage._copy

    def cancelling(memory_obj: Any, size: int) -> Any:
        control.cancel()
        return real(memory_obj, size)

    monkeypatch.setattr(stage, "_copy", cancelling)
    result = storage.prefetch(hashes, tier=Tier.DEVICE, control=control)
    assert (result.state, result.chunk_status) == (State.CANCELLED, (LOADED, *[ChunkStatus.NOT_TRIED] * 2))
    assert result.reason == "cancelled after 1 of 3 chunks"
    late = storage.prefetch(hashes, tier=Tier.DEVICE, control=Control(deadline_ns=1))
    assert (late.state, late.bytes_by_tier) == (State.EXPIRED, {})
    assert ChunkStatus.LOADED not in late.chunk_status
    rig.check()


def test_prefetches_that_overlap_copy_once(rig: Rig, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = rig.store(rig.tokens(2))
    stage = stage_of(rig)
    real, entered, go_on, copied = stage._copy, threading.Event(), threading.Event(), []

    def slow(memory_obj: Any, size: int) -> Any:
        copied.append(memory_obj)
        entered.set()
        assert go_on.wait(20)
        return real(memory_obj, size)

    monkeypatch.setattr(stage, "_copy", slow)
    results: list[OpResult] = []
    threads = [
        threading.Thread(target=lambda: results.append(storage.prefetch(hashes, tier=Tier.DEVICE))) for _ in range(2)
    ]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(copied) == 2
    assert [result.state for result in results] == [State.SUCCEEDED] * 2
    assert sum(result.bytes_by_tier.get("device", 0) for result in results) == 2 * rig.chunk_bytes
    rig.check()


def test_who_may_not_see_a_chunk_learns_nothing_of_its_copy(rig: Rig) -> None:
    class Stranger(Nobody):
        def visible(self, tenant: str, chunk_hash: int) -> bool:
            return tenant == "mine"

    storage = LMCacheStorage(rig.engine, Stranger())
    hashes = rig.store(rig.tokens(1))
    assert storage.prefetch(hashes, tier=Tier.DEVICE, tenant="other").chunk_status == (ChunkStatus.MISSING,)
    assert stage_of(rig).usage() == (0, 0)
    storage.prefetch(hashes, tier=Tier.DEVICE, tenant="mine")
    assert storage.evict(hashes, tiers=(Tier.DEVICE,), tenant="other").chunk_status == (ChunkStatus.ABSENT,)
    assert storage.locate(hashes, tenant="other").chunk_tiers == ((),)
    assert stage_of(rig).usage()[1] == 1


def test_without_a_stage_the_device_is_refused(rig: Rig, storage: LMCacheStorage) -> None:
    staged = rig.engine.gpu_connector
    hashes = rig.store(rig.tokens(1))
    for connector, words in (
        (staged.connector, "PagesInHostMemory.*SEMKV_DEVICE_STAGE_MIB"),
        (StagedConnector(staged.connector, DeviceStage(1)), "has not registered its KV tensors"),
    ):
        rig.engine.gpu_connector = connector
        result = storage.prefetch(hashes, tier=Tier.DEVICE)
        assert (result.state, result.chunk_status) == (State.REJECTED, (ChunkStatus.UNSUPPORTED,))
        assert result.reason is not None
        assert re.search(words, result.reason)
        assert storage.evict(hashes, tiers=(Tier.DEVICE,)).chunk_status == (ChunkStatus.UNSUPPORTED,)
        assert [tier.name for tier in storage.tiers()] == ["cpu", "disk"]


def test_a_hit_on_a_copy_is_its_prefetchs(rig: Rig) -> None:
    """The copy is handed over behind whoever watches what the connector receives."""
    told: list[Outcome] = []
    attribution = Attribution(told.append)
    attribution.watch_device(rig.engine)
    storage = LMCacheStorage(rig.engine, Nobody(), watch=attribution)
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    rig.drop_from_ddr(tokens)
    storage.prefetch(hashes, tier=Tier.DEVICE, control=Control(command_id="warm"))
    rig.retrieve(rig.lookup(tokens), tokens)
    attribution.sweep()
    assert [is_copy for is_copy, _ in given(rig)] == [True, True]
    assert [(outcome.command_id, outcome.useful, outcome.wasted) for outcome in told] == [("warm", 2, 0)]
