# SPDX-License-Identifier: Apache-2.0
"""The device stage on LMCache's own memory objects, with CPU memory as the device: what is handed out is not stale."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

from semkv.native.connector.accelerator import AcceleratorConnector
from semkv.native.connector.stage import VARIABLE, DeviceStage, StagedConnector, StageFullError, staged

pytestmark = pytest.mark.lmcache
SIZE = 4096
CPU = torch.device("cpu")


class Pool:
    """LMCache's allocator over memory for a few objects."""

    def __init__(self, objects: int) -> None:
        from lmcache.v1.memory_management import TensorMemoryAllocator

        self.allocator = TensorMemoryAllocator(torch.zeros(objects * SIZE, dtype=torch.uint8))

    def take(self, value: int) -> Any:
        memory_obj = self.allocator.allocate(torch.Size([SIZE]), torch.uint8)
        assert memory_obj is not None
        memory_obj.raw_data.fill_(value)
        return memory_obj


@pytest.fixture
def pool() -> Pool:
    return Pool(8)


@pytest.fixture
def stage() -> DeviceStage:
    made = DeviceStage(4 * SIZE)
    made.bind(CPU)
    return made


def put(stage: DeviceStage, memory_obj: Any) -> bool:
    copy, made = stage.place(memory_obj)
    stage.release([copy])
    return made


def held(stage: DeviceStage, *memory_objs: Any) -> list[int | None]:
    """The first byte of each copy that is handed out."""
    lent = stage.lend(memory_objs)
    stage.release(copy for copy in lent if copy is not None)
    return [None if copy is None else int(copy.raw_data[0]) for copy in lent]


def test_a_copy_is_handed_out_for_its_object_alone(pool: Pool, stage: DeviceStage) -> None:
    one, other = pool.take(1), pool.take(2)
    assert put(stage, one)
    assert not put(stage, one)
    assert held(stage, one, other) == [1, None]
    assert stage.handed_over == 1
    assert stage.usage() == (SIZE, 1)
    assert stage.size_of(one) == SIZE
    assert stage.size_of(other) is None
    copy = stage.lend([one])[0]
    assert copy is not None
    assert copy.raw_data.data_ptr() != one.raw_data.data_ptr()
    assert copy.get_size() == one.get_size()


def test_an_object_that_is_freed_takes_its_copy_along(pool: Pool, stage: DeviceStage) -> None:
    memory_obj = pool.take(1)
    put(stage, memory_obj)
    memory_obj.ref_count_down()  # LMCache frees it; somebody still has the Python object
    assert not memory_obj.is_valid()
    again = pool.take(2)  # the memory is reused
    assert again.raw_data.data_ptr() == memory_obj.raw_data.data_ptr()
    assert held(stage, memory_obj, again) == [None, None]
    assert stage.usage() == (0, 0)


def test_a_freed_object_is_let_go_without_being_asked_for(pool: Pool, stage: DeviceStage) -> None:
    memory_obj = pool.take(1)
    put(stage, memory_obj)
    memory_obj.ref_count_down()
    assert stage.usage() == (0, 0)


def test_an_object_that_is_gone_takes_its_copy_along_at_once(pool: Pool, stage: DeviceStage) -> None:
    memory_obj = pool.take(1)
    put(stage, memory_obj)
    copy = stage.lend([memory_obj])[0]
    assert copy is not None
    stage.release([copy])
    memory_obj.ref_count_down()
    del memory_obj
    gc.collect()
    assert copy.retired  # before anything else is asked of the stage


def test_an_object_at_the_place_of_a_dead_one_gets_nothing(pool: Pool, stage: DeviceStage) -> None:
    """Python gives the identity of a dead object to a new one."""
    dead = pool.take(1)
    put(stage, dead)
    identity = id(dead)
    copy = stage.lend([dead])[0]
    assert copy is not None
    stage.release([copy])
    later = pool.take(2)
    stage._copies[id(later)] = stage._copies.pop(identity)  # as if `later` lay where `dead` lay
    assert held(stage, later) == [None]
    assert put(stage, later)
    dead.ref_count_down()
    del dead
    gc.collect()
    assert held(stage, later) == [2]
    # The other way round: the news of a death arrives after the place was taken again.
    stage._gone(id(later))
    assert held(stage, later) == [2]


def test_the_death_of_an_object_in_a_thread_that_is_inside(pool: Pool, stage: DeviceStage) -> None:
    memory_obj = pool.take(1)
    put(stage, memory_obj)
    with stage._locked():
        memory_obj.ref_count_down()
        del memory_obj
        gc.collect()
        assert len(stage._copies) == 1  # the callback did not wait for the lock, nor touch what it guards
    assert len(stage._copies) == 0
    assert stage.usage() == (0, 0)


def test_a_replaced_entry_hands_out_nothing_of_the_old_one(pool: Pool, stage: DeviceStage) -> None:
    hot_cache = {"key": pool.take(1)}
    put(stage, hot_cache["key"])
    old, hot_cache["key"] = hot_cache["key"], pool.take(2)
    old.ref_count_down()
    assert held(stage, hot_cache["key"]) == [None]
    put(stage, hot_cache["key"])
    assert held(stage, hot_cache["key"], old) == [2, None]


def test_the_budget_holds_and_the_longest_unused_goes_first(pool: Pool, stage: DeviceStage) -> None:
    objects = [pool.take(number) for number in range(6)]
    for memory_obj in objects[:4]:
        put(stage, memory_obj)
    held(stage, objects[0])
    put(stage, objects[1])
    put(stage, objects[4])
    assert held(stage, *objects) == [0, 1, None, 3, 4, None]
    assert stage.usage() == (4 * SIZE, 4)


def test_copies_in_use_stay(pool: Pool, stage: DeviceStage) -> None:
    objects = [pool.take(number) for number in range(6)]
    used = [stage.place(memory_obj)[0] for memory_obj in objects[:4]]
    with pytest.raises(StageFullError, match=rf"a copy of {SIZE} bytes does not fit .*{VARIABLE}"):
        stage.place(objects[4])
    assert not stage.drop(objects[0])
    assert stage.usage() == (4 * SIZE, 4)
    stage.release(used)
    assert stage.drop(objects[0])
    assert stage.drop(objects[0])  # nothing there: nothing to do
    assert put(stage, objects[4])
    assert stage.usage() == (4 * SIZE, 4)


def test_bytes_that_a_reader_still_reads_stay_counted(pool: Pool, stage: DeviceStage) -> None:
    memory_obj = pool.take(1)
    put(stage, memory_obj)
    lent = stage.lend([memory_obj])
    memory_obj.ref_count_down()  # LMCache lets go while a load reads the copy
    assert stage.usage() == (SIZE, 0)
    assert int(lent[0].raw_data[0]) == 1  # type: ignore[union-attr]  # it was there
    stage.release(copy for copy in lent if copy is not None)
    assert stage.usage() == (0, 0)


def test_what_is_too_large_or_fails_takes_no_room(
    pool: Pool, stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(stage, pool_object := pool.take(1))
    small = DeviceStage(SIZE - 1)
    small.bind(CPU)
    with pytest.raises(StageFullError):
        small.place(pool_object)
    assert small.usage() == (0, 0)
    other = pool.take(2)
    for error, expected in ((RuntimeError("broken"), RuntimeError), (torch.OutOfMemoryError("none"), StageFullError)):

        def broken(_obj: Any, _size: int, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(stage, "_copy", broken)
        with pytest.raises(expected):
            stage.place(other)
    assert stage.usage() == (SIZE, 1)
    unbound = DeviceStage(SIZE)
    with pytest.raises(RuntimeError, match="has not registered"):
        unbound.place(other)


def test_objects_that_lmcache_gives_out_again_are_refused(stage: DeviceStage) -> None:
    from lmcache.v1.memory_management import MemoryFormat, PagedTensorMemoryAllocator

    shape = [torch.Size([2, 1, 16, 32])]
    allocator = PagedTensorMemoryAllocator(
        torch.zeros(4 * SIZE, dtype=torch.uint8), shape, [torch.float32], MemoryFormat.KV_2LTD
    )
    with pytest.raises(ValueError, match="paged allocator"):
        stage.place(allocator.allocate(shape, [torch.float32]))
    assert stage.usage() == (0, 0)


def test_two_threads_make_one_copy(pool: Pool, stage: DeviceStage, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_obj = pool.take(1)
    both = threading.Barrier(2)
    real = stage._copy

    def together(obj: Any, size: int) -> Any:
        both.wait(20)
        return real(obj, size)

    monkeypatch.setattr(stage, "_copy", together)
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(put(stage, memory_obj))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, True]
    assert stage.usage() == (SIZE, 1)


class Watched:
    """A device connector that notes what it is given and fails when told to."""

    device = CPU

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.fails = 0
        self.load_stream = "a stream"

    def register(self, kv_caches: Any) -> int:
        return len(kv_caches)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_kwargs: Any) -> None:
        self.given.append([int(obj.raw_data[0]) for obj in memory_objs])
        if self.fails:
            self.fails -= 1
            raise RuntimeError("broken")


def test_the_connector_is_given_copies_where_there_are_any(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    stage = DeviceStage(4 * SIZE)
    connector = StagedConnector(watched, stage)
    assert not stage.bound
    assert connector.register([1, 2, 3]) == 3
    assert stage.bound
    assert connector.load_stream == "a stream"
    first, second = pool.take(1), pool.take(2)
    put(stage, second)
    second.raw_data.fill_(9)  # so that it shows which is read
    connector.batched_to_gpu([first, second], [0, 4], [4, 8])
    connector.to_gpu(second, 4, 8)
    assert watched.given == [[1, 2], [2]]
    assert all(copy.users == 0 for copy in stage._copies.values())

    watched.given, watched.fails = [], 1
    with caplog.at_level(logging.ERROR):
        connector.batched_to_gpu([first, second], [0, 4], [4, 8])
    assert watched.given == [[1, 2], [1, 9]]  # once more, from the objects themselves
    assert "loading from host memory" in caplog.text
    assert stage.usage() == (0, 0)
    watched.fails = 1
    with pytest.raises(RuntimeError, match="broken"):
        connector.batched_to_gpu([first], [0], [4])


@pytest.mark.parametrize("block", [8, 64])  # gathered and scattered on the device; copied block by block
def test_bytes_are_those_of_a_load_from_host_memory(pool: Pool, block: int) -> None:
    def pages() -> list[torch.Tensor]:
        return [torch.randint(0, 256, (8, 4, 1, block), dtype=torch.uint8) for _ in range(2)]

    source, plain, staging = pages(), pages(), pages()
    for left, right in zip(plain, staging, strict=True):
        right.copy_(left)
    connectors = []
    for tensors in (source, plain, staging):
        connector = AcceleratorConnector(4, {"kv_layout": "NHD"})
        per_block = connector.register(tensors)
        connectors.append(connector)
    stores, loads, inner = connectors
    stage = DeviceStage(4 * SIZE)
    stage.bind(CPU)
    front = StagedConnector(inner, stage)
    objects = [pool.allocator.allocate(torch.Size([2 * per_block]), torch.uint8) for _ in range(3)]
    slots = torch.cat([torch.arange(number * 4, number * 4 + 4) for number in (5, 2, 7, 0, 1, 3)])
    where: Any = ([0, 8, 16], [8, 16, 24])
    stores.batched_from_gpu(objects, *where, slot_mapping=slots)
    put(stage, objects[1])
    put(stage, objects[2])
    loads.batched_to_gpu(objects, *where, slot_mapping=slots, vllm_cached_tokens=4)
    for memory_obj in objects[1:]:
        memory_obj.raw_data.zero_()  # the bytes come from the copies
    front.batched_to_gpu(objects, *where, slot_mapping=slots, vllm_cached_tokens=4)
    assert stage.handed_over == 2
    assert all(torch.equal(left, right) for left, right in zip(plain, staging, strict=True))


def test_the_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    connector = Watched()
    for off in (None, "", "0"):
        monkeypatch.delenv(VARIABLE, raising=False) if off is None else monkeypatch.setenv(VARIABLE, off)
        assert staged(connector) is connector
    monkeypatch.setenv(VARIABLE, "3")
    assert staged(connector).device_stage.capacity == 3 << 20
    assert not caplog.records
    monkeypatch.setenv(VARIABLE, "1 GiB")
    assert staged(connector) is connector
    assert "'1 GiB' is not a whole number of MiB" in caplog.text
