# SPDX-License-Identifier: Apache-2.0
"""What test_npu.py runs under torch_npu: the arguments name functions below. Prints PASSED and its name for each."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
import torch_npu  # noqa: F401 - the real package, on the emulated runtime

from semkv.native.layout import EngineKVFormat
from semkv.native.transfer.accelerator import AcceleratorTransfer, Chunk, can_gather
from semkv.native.transfer.cpu import BlockTransfer

F = EngineKVFormat
DEVICE = torch.device("npu:0")
FORMATS = {
    F.NL_X_TWO_X_NB_BS_NH_HS: lambda: [[noise(8, 4, 2, 16), noise(8, 4, 2, 16)] for _ in range(3)],
    F.NL_X_NP_X_NB_BS_ONE_HS: lambda: [[noise(8, 4, 1, 512), noise(8, 4, 1, 64)] for _ in range(3)],
    F.NL_X_TWO_X_NB_NZ_BS_C0: lambda: [[noise(8, 8, 4, 16), noise(8, 8, 4, 16)] for _ in range(3)],
    F.NL_X_NB_BS_NH_CS: lambda: [noise(8, 4, 2, 32) for _ in range(3)],
}


def noise(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randint(-1000, 1000, shape, dtype=torch.int16).view(dtype)


def moved(cache: Any, device: torch.device) -> Any:
    if isinstance(cache, torch.Tensor):
        return cache.to(device)
    return [moved(entry, device) for entry in cache]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8).cpu(), right.view(torch.uint8).cpu())


def every_format(pinned: bool) -> None:
    for fmt, build in FORMATS.items():
        host = build()
        device = moved(host, DEVICE)
        reference = BlockTransfer(host, fmt)
        transfer = AcceleratorTransfer(device, fmt)
        assert transfer.strategy == "copies", "the emulation has no kernels to gather with"
        chunks, expected = [], []
        for ids in ([5, 1, 2, 3], [7], [0, 6], [4, 3]):
            obj = torch.zeros(transfer.object_bytes(len(ids)), dtype=torch.uint8)
            chunks.append(Chunk(ids, obj.pin_memory() if pinned else obj))
            wanted = torch.zeros_like(obj)
            reference.gather(ids, wanted)
            expected.append(wanted)
        transfer.store(chunks)
        for chunk, wanted in zip(chunks, expected, strict=True):
            assert torch.equal(chunk.obj, wanted), fmt.name

        # Into empty pages, the first block of a chunk left alone.
        empty_host = [[torch.zeros_like(p) for p in e] if isinstance(e, list) else torch.zeros_like(e) for e in host]
        empty = moved(empty_host, DEVICE)
        AcceleratorTransfer(empty, fmt).load(
            [Chunk(c.ids, c.obj, skip=1 if i == 0 else 0) for i, c in enumerate(chunks)]
        )
        target = BlockTransfer(empty_host, fmt)
        for index, chunk in enumerate(chunks):
            target.scatter(chunk.ids, chunk.obj, skip_blocks=1 if index == 0 else 0)
        for got, wanted in zip(empty, empty_host, strict=True):
            pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
            assert all(same(a, b) for a, b in pairs), fmt.name


def pinned() -> None:
    every_format(True)


def pageable() -> None:
    every_format(False)


def ordering() -> None:
    """Copies are slow here. A store sees what the engine wrote before it; the engine sees what a load wrote."""
    layer = torch.zeros(4, 64, 1, 512, dtype=torch.float16).to(DEVICE)
    new = noise(4, 64, 1, 512).pin_memory()
    transfer = AcceleratorTransfer([layer], F.NL_X_NB_BS_NH_HS)
    obj = torch.zeros(transfer.object_bytes(4), dtype=torch.uint8).pin_memory()
    layer.copy_(new, non_blocking=True)  # the engine writes KV: one long copy, longer than each block's of the store
    transfer.store([Chunk([3, 2, 1, 0], obj)])
    assert torch.equal(obj, new.flip(0).contiguous().view(torch.uint8).reshape(-1))

    other = torch.zeros(4, 64, 1, 512, dtype=torch.float16).to(DEVICE)
    loader = AcceleratorTransfer([other], F.NL_X_NB_BS_NH_HS)
    other.copy_(new, non_blocking=True)  # the engine still writes to the pages: what is loaded comes after
    loader.load([Chunk([2, 0, 3, 1], obj)])
    obj.zero_()  # the object is let go
    read = torch.empty(other.shape, dtype=other.dtype).pin_memory()
    read.copy_(other, non_blocking=True)  # the engine reads at once, on its own stream
    torch.npu.current_stream().synchronize()
    assert same(read[[2, 0, 3, 1]], new.flip(0))


def overlap() -> None:
    """A store and a load of one transfer at once, through pinned buffers: the trace is read by the test."""
    import threading

    layers = [noise(8, 64, 1, 512).to(DEVICE) for _ in range(4)]
    wanted = [layer.cpu() for layer in layers]
    transfer = AcceleratorTransfer(layers, F.NL_X_NB_BS_NH_HS)
    size = transfer.object_bytes(1)
    stored = [torch.zeros(size, dtype=torch.uint8) for _ in range(4)]
    loaded = [torch.full((size,), number, dtype=torch.uint8) for number in range(4)]
    chunks = [
        [Chunk([2 * number + half], obj) for number, obj in enumerate(objects)]
        for half, objects in ((0, stored), (1, loaded))
    ]
    both = threading.Barrier(2)

    def run(move: Any, chunks: list[Chunk]) -> None:
        both.wait(20)
        move(chunks)

    threads = [
        threading.Thread(target=run, args=(transfer.store, chunks[0])),
        threading.Thread(target=run, args=(transfer.load, chunks[1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        taken = torch.cat([layer[2 * number].reshape(-1) for layer in wanted]).view(torch.uint8)
        assert torch.equal(stored[number], taken)
        assert all(bool((layer[2 * number + 1].cpu().view(torch.uint8) == number).all()) for layer in layers)


def on_device_objects() -> None:
    """A chunk that is on the device already is copied there, after what put it there, and no host buffer is used."""
    pages = [noise(6, 16, 2, 64).to(DEVICE) for _ in range(2)]
    source = [noise(6, 16, 2, 64) for _ in range(2)]
    reference = BlockTransfer(source, F.NL_X_NB_BS_NH_HS)
    transfer = AcceleratorTransfer(pages, F.NL_X_NB_BS_NH_HS)
    host = torch.zeros(reference.object_bytes(3), dtype=torch.uint8)
    reference.gather([4, 0, 2], host)
    other = torch.Stream(device=DEVICE)
    pinned_host = host.pin_memory()
    with other:
        there = torch.empty(len(host), dtype=torch.uint8, device=DEVICE)
        there.copy_(pinned_host, non_blocking=True)
        ready = transfer.streams.mark(other)
    transfer.load([Chunk([1, 3, 5], there, skip=1, ready=ready)])
    for page, wanted in zip(pages, source, strict=True):
        assert same(page[3], wanted[0])
        assert same(page[5], wanted[2])
    assert transfer._for_loads.host[0]._memory is None
    try:
        transfer.store([Chunk([1], there)])
    except ValueError as error:
        assert "contiguous bytes on cpu are needed" in str(error)
    else:
        raise AssertionError("a store into device memory was not refused")


def kernels() -> None:
    assert not can_gather(DEVICE)


def refused() -> None:
    transfer = AcceleratorTransfer([torch.zeros(4, 2, 1, 8, device="cpu").to(DEVICE)], F.NL_X_NB_BS_NH_HS)
    obj = torch.zeros(transfer.object_bytes(2), dtype=torch.uint8)
    for chunk, error in (
        (Chunk([0, 4], obj), IndexError),
        (Chunk([0, -1], obj), IndexError),
        (Chunk([0], obj, skip=2), IndexError),
        (Chunk([0, 1, 2], obj), ValueError),
    ):
        for move in (transfer.store, transfer.load):
            try:
                move([chunk])
            except error:
                continue
            raise AssertionError(f"{chunk.ids} was not refused")


def connector() -> None:
    """The device connector with LMCache's own memory objects: what one request stored, another loads."""
    from lmcache.v1.memory_management import AdHocMemoryAllocator

    from semkv.native.connector.accelerator import AcceleratorConnector

    host = [(noise(8, 16, 2, 32), noise(8, 16, 2, 32)) for _ in range(3)]
    device = [tuple(part.to(DEVICE) for part in pair) for pair in host]
    stores = AcceleratorConnector(16, {})
    per_block = stores.register(device)
    assert stores.tag == "nl_x_two_x_nb_bs_nh_hs.b16"
    objects = [AdHocMemoryAllocator("cpu").allocate(torch.Size([2 * per_block]), torch.uint8) for _ in range(3)]
    slots = torch.cat([torch.arange(block * 16, block * 16 + 16) for block in (7, 2, 3, 0, 5, 1)])
    ranges = ([0, 32, 64], [32, 64, 90])
    stores.batched_from_gpu(objects, *ranges, slot_mapping=slots)
    empty = [tuple(torch.zeros_like(part).to(DEVICE) for part in pair) for pair in host]
    loads = AcceleratorConnector(16, {})
    loads.register(empty)
    loads.batched_to_gpu(objects, *ranges, slot_mapping=slots, vllm_cached_tokens=48)
    for got_pair, wanted_pair in zip(empty, host, strict=True):
        for got, wanted in zip(got_pair, wanted_pair, strict=True):
            back = got.cpu()
            assert all(same(back[block], wanted[block]) for block in (0, 5, 1))
            assert not any(back[block].view(torch.int16).any() for block in (7, 2, 3, 4, 6))
    for call in (stores.from_gpu, loads.to_gpu):
        try:
            call(objects[0], 0, 16, slot_mapping=torch.arange(5, 21))
        except ValueError as error:
            assert "does not begin a block" in str(error)
        else:
            raise AssertionError("a slot inside a block was not refused")


for name in sys.argv[1:]:
    torch.manual_seed(3)
    try:
        globals()[name]()
    except Exception:
        traceback.print_exc()
    else:
        print(f"PASSED {name}.", flush=True)
