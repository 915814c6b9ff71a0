# SPDX-License-Identifier: Apache-2.0
"""Both strategies of accelerator transfers on CPU tensors, which can gather, against the CPU transfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semkv.native.layout import EngineKVFormat, LayoutError
from semkv.native.transfer.accelerator import AcceleratorTransfer, Chunk, can_gather, runs_of
from semkv.native.transfer.cpu import BlockTransfer
from semkv.native.transfer.streams import AcceleratorMissingError, DeviceStreams, Mark, load_npu
from tests.native.transfer.test_cpu import Sizes, build, clone

F = EngineKVFormat
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CHUNKS = ([5, 1, 2, 3], [6], [0, 4], [3, 2, 1])


@pytest.mark.parametrize("strategy", ["copies", "staging"])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("fmt", F, ids=lambda fmt: fmt.name)
def test_as_the_cpu_transfer(fmt: EngineKVFormat, padding: int, strategy: Any) -> None:
    sizes = Sizes(7, 2, 3, 2, 8, torch.float16, padding)
    cache = build(fmt, sizes)
    expected = BlockTransfer(cache, fmt, block_size=3)
    transfer = AcceleratorTransfer(cache, fmt, block_size=3, strategy=strategy)
    chunks = [Chunk(ids, torch.zeros(transfer.object_bytes(len(ids)), dtype=torch.uint8)) for ids in CHUNKS]
    transfer.store(chunks)
    for chunk in chunks:
        wanted = torch.zeros_like(chunk.obj)
        expected.gather(chunk.ids, wanted)
        assert torch.equal(chunk.obj, wanted)
    for skip in (0, 1):
        left, right = clone(cache), clone(cache)
        AcceleratorTransfer(left, fmt, block_size=3, strategy=strategy).load(
            [Chunk(c.ids, c.obj, skip) for c in chunks]
        )
        target = BlockTransfer(right, fmt, block_size=3)
        for chunk in chunks:
            target.scatter(chunk.ids, chunk.obj, skip_blocks=skip)
        everything = list(range(7))
        results = []
        for pages in (left, right):
            obj = torch.zeros(target.object_bytes(7), dtype=torch.uint8)
            BlockTransfer(pages, fmt, block_size=3).gather(everything, obj)
            results.append(obj)
        assert torch.equal(*results)


class Recording(DeviceStreams):
    """Notes when points in a stream are made and waited for."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.marks = 0

    def mark(self, stream: Any) -> Mark:
        number, self.marks, log = self.marks, self.marks + 1, self.log
        log.append(("queued", number))

        class Noted(Mark):
            def wait(self) -> None:
                log.append(("waited", number))

        return Noted(None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False


@pytest.mark.parametrize("direction", ["store", "load"])
def test_two_buffers_are_in_flight(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is filled when the chunk before last is through, while the last one is still under way."""
    log: list[tuple[str, int]] = []
    transfer = AcceleratorTransfer([torch.zeros(8, 2, 1, 8)], F.NL_X_NB_BS_NH_HS)
    transfer.streams = Recording(log)
    real, fills = transfer._in_host_memory, iter(range(99))

    def filling(*arguments: Any) -> torch.Tensor:
        log.append(("filled", next(fills)))
        return real(*arguments)

    monkeypatch.setattr(transfer, "_in_host_memory", filling)
    chunks = [Chunk([number], torch.zeros(transfer.object_bytes(1), dtype=torch.uint8)) for number in range(5)]
    getattr(transfer, direction)(chunks)
    for number in range(2, 5):
        done = log[: log.index(("filled", number))]
        assert ("waited", number - 2) in done
        assert ("queued", number - 1) in done
        assert ("waited", number - 1) not in done
    buffers = (transfer._for_stores if direction == "store" else transfer._for_loads).host
    other = (transfer._for_loads if direction == "store" else transfer._for_stores).host
    assert all(buffer._memory is not None for buffer in buffers)
    assert all(buffer._memory is None for buffer in other)  # each direction has its own


@pytest.mark.parametrize("direction", ["store", "load"])
def test_nothing_is_under_way_after_an_error(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    transfer = AcceleratorTransfer([torch.zeros(8, 2, 1, 8)], F.NL_X_NB_BS_NH_HS)
    transfer.streams = Recording(log)
    calls = iter((None, RuntimeError("the device is lost")))

    def failing(*_arguments: Any) -> None:
        if (error := next(calls)) is not None:
            raise error

    monkeypatch.setattr(transfer, "_to_host" if direction == "store" else "_to_pages", failing)
    chunks = [Chunk([number], torch.zeros(transfer.object_bytes(1), dtype=torch.uint8)) for number in range(2)]
    with pytest.raises(RuntimeError, match="lost"):
        getattr(transfer, direction)(chunks)
    assert log[-2:] == [("queued", 1), ("waited", 1)]  # all that was queued, the failed chunk's first copies too


def test_small_blocks_are_staged_where_the_device_can() -> None:
    assert can_gather(torch.device("cpu"))
    small = AcceleratorTransfer([torch.zeros(4, 2, 1, 8)], F.NL_X_NB_BS_NH_HS)
    large = AcceleratorTransfer([torch.zeros(4, 128, 8, 128)], F.NL_X_NB_BS_NH_HS)
    assert (small.strategy, large.strategy) == ("staging", "copies")


def test_runs() -> None:
    assert runs_of([5, 6, 7, 1, 2, 9], 1) == [(1, 6, 2), (3, 1, 2), (5, 9, 1)]
    assert runs_of([5, 6], 0, joined=False) == [(0, 5, 1), (1, 6, 1)]
    assert runs_of([5], 1) == []


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(LayoutError, match="several devices"):
        AcceleratorTransfer([torch.zeros(2, 2, 2), torch.zeros(2, 2, 2, device="meta")], F.NL_X_NB_BS_HS)
    with pytest.raises(AcceleratorMissingError, match="torch_npu does not load"):
        load_npu()
