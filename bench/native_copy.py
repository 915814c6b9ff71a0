# SPDX-License-Identifier: Apache-2.0
"""Paged KV to chunk objects and back on a CPU, as ratios to memcpy of the same bytes in the same run.

`run()` prints the table and returns the figures. Every figure is the fastest of interleaved rounds, each of which times
one call of each contender: what else runs on the machine can only slow a call down. Objects and pages rotate, so that
none is found in a cache. The streaming copy (from one place to another in one piece, past the caches, several places
read in turn) is what a core can reach at all. `native_fallback` measures LMCache's own transfers beside.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from semkv.native.extension import core
from semkv.native.layout import EngineKVFormat, EngineType, normalize_kv_and_discover_format
from semkv.native.transfer.cpu import BlockTransfer, RowTransfer

F = EngineKVFormat
LAYERS, HEADS, HEAD, BLOCK, LATENT = 32, 8, 128, 16, 576  # an 8B model's KV, 16 tokens a block; MLA's 576
BLOCKS = 192
DTYPE = torch.bfloat16
ROUNDS = 15
ROTATION = 192 << 20  # bytes of objects to rotate through: several times any cache

SHAPES: dict[EngineKVFormat, Callable[[int], tuple[int, ...]]] = {  # by how many blocks there are
    F.NL_X_TWO_NB_BS_NH_HS: lambda nb: (2, nb, BLOCK, HEADS, HEAD),
    F.NL_X_NB_TWO_BS_NH_HS: lambda nb: (nb, 2, BLOCK, HEADS, HEAD),
    F.NL_X_TWO_NB_NH_BS_HS: lambda nb: (2, nb, HEADS, BLOCK, HEAD),
    F.NL_X_NB_NH_BS_CS: lambda nb: (nb, HEADS, BLOCK, 2 * HEAD),
    F.NL_X_NB_BS_HS: lambda nb: (nb, BLOCK, LATENT),
    F.NL_X_TWO_X_NB_BS_NH_HS: lambda nb: (nb, BLOCK, HEADS, HEAD),
    F.NL_X_NP_X_NB_BS_ONE_HS: lambda nb: (nb, BLOCK, 1, LATENT),  # in planes of 512 and 64
    F.NL_X_NB_PAGE: lambda nb: (nb, HEADS, BLOCK, 2 * HEAD),
}


def pages(fmt: EngineKVFormat, blocks: int = BLOCKS) -> Any:
    shape = SHAPES[fmt](blocks)
    if fmt == F.NL_X_TWO_X_NB_BS_NH_HS:
        return [[torch.ones(shape, dtype=DTYPE) for _ in range(2)] for _ in range(LAYERS)]
    if fmt == F.NL_X_NP_X_NB_BS_ONE_HS:
        return [[torch.ones((*shape[:-1], width), dtype=DTYPE) for width in (512, 64)] for _ in range(LAYERS)]
    return [torch.ones(shape, dtype=DTYPE) for _ in range(LAYERS)]


def memcpy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """All of one object's bytes into another."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


def streaming_copy(destination: torch.Tensor, source: torch.Tensor, threads: int, parts: int = 64) -> None:
    """The same with stores that go past the caches, several parts side by side: nothing here copies faster."""
    size = source.numel() * source.element_size() // parts
    native = core()
    copier = native.BlockCopier([(source.data_ptr() + part * size, size, size, 1) for part in range(parts)])
    where = (torch.zeros(1, dtype=torch.int64), destination.data_ptr(), parts * size)
    copier.copy_ids(native.Direction.gather, *where, threads=threads, stores=native.Stores.streaming)


def fastest_ms(
    contenders: dict[str, Callable[[], None]], rounds: int = ROUNDS, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[str, float]:
    """Each contender's fastest of interleaved rounds, the first round left out."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            start = clock()
            call()
            times[name].append((clock() - start) / 1e6)
    return {name: min(values[1:]) for name, values in times.items()}


def measure(fmt: EngineKVFormat, tokens: int, threads: int) -> dict[str, Any]:
    cache = pages(fmt)
    blocks = tokens // BLOCK
    generator = torch.Generator().manual_seed(1)
    whole = BlockTransfer(cache, fmt, threads=threads)
    size = whole.object_bytes(blocks)
    count = max(6, ROTATION // size)
    objects = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    orders = [torch.randperm(BLOCKS, generator=generator)[:blocks] for _ in range(count)]
    turn = itertools.count()

    def at() -> int:
        """The next object: each call of each contender has one of its own."""
        return next(turn) % count

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        here = at()
        return objects[here], objects[(here + count // 2) % count]

    contenders: dict[str, Callable[[], None]] = {
        "memcpy": lambda: memcpy(*pair()),
        "streaming": lambda: streaming_copy(*pair(), threads),
        "blocks gather": lambda: whole.gather(orders[here := at()], objects[here]),
        "blocks scatter": lambda: whole.scatter(orders[here := at()], objects[here]),
    }
    if fmt != F.NL_X_NB_PAGE:
        rows = RowTransfer(cache, fmt, threads=threads)
        contenders["rows gather"] = lambda: rows.gather(orders[here := at()], tokens, objects[here])
        contenders["rows scatter"] = lambda: rows.scatter(orders[here := at()], tokens, objects[here])
    if isinstance(cache[0], torch.Tensor):
        contenders["index_select"] = index_select(cache, fmt, orders, objects, at)
    torch.set_num_threads(threads)
    times = fastest_ms(contenders)
    base = times["memcpy"]
    return {
        "mib": size / 2**20,
        "memcpy_gb_s": size / base / 1e6,
        "of_memcpy": {name: base / value for name, value in times.items() if name != "memcpy"},
    }


def index_select(
    cache: list[torch.Tensor],
    fmt: EngineKVFormat,
    orders: list[torch.Tensor],
    objects: list[torch.Tensor],
    at: Callable[[], int],
) -> Callable[[], None]:
    """What torch does best: one index_select a layer, straight into the object's place for its blocks."""
    shape = list(SHAPES[fmt](BLOCKS))
    axis = 1 if shape[0] == 2 else 0
    shape[axis] = len(orders[0])
    places = [obj.view(DTYPE).view(LAYERS, *shape) for obj in objects]

    def call() -> None:
        here = at()
        for layer, tensor in enumerate(cache):
            torch.index_select(tensor, axis, orders[here], out=places[here][layer])

    return call


def detection() -> float:
    """Milliseconds to find the format of 100 layers."""
    layers = [torch.empty(2, 64, 16, 8, 128, dtype=DTYPE) for _ in range(100)]

    def detect() -> None:
        normalize_kv_and_discover_format(layers, EngineType.VLLM, {"kv_layout": "NHD"})

    return fastest_ms({"detect": detect})["detect"]


def run(*, tokens: tuple[int, ...] = (64, 256, 1024), threads: tuple[int, ...] = (1, 2)) -> dict[str, float]:
    """Measures, prints the table, returns figures by name; `….of_memcpy` is memcpy's time over the contender's."""
    figures: dict[str, float] = {}
    names = ["streaming", "blocks gather", "blocks scatter", "rows gather", "rows scatter", "index_select"]
    print(
        f"{'format':24} {'tokens':>6} {'thr':>3} {'MiB':>6} {'memcpy GB/s':>11} " + " ".join(f"{n:>14}" for n in names)
    )
    before = torch.get_num_threads()
    for fmt in SHAPES:
        for count in tokens:
            for crew in threads:
                row = measure(fmt, count, crew)
                ratios = " ".join(f"{row['of_memcpy'].get(n, float('nan')):14.2f}" for n in names)
                print(
                    f"{fmt.name:24} {count:6} {crew:3} {row['mib']:6.1f} {row['memcpy_gb_s']:11.1f} {ratios}",
                    flush=True,
                )
                key = f"{fmt.name.lower()}.{count}_tokens.{crew}_threads"
                figures[f"{key}.memcpy_gb_s"] = row["memcpy_gb_s"]
                figures |= {f"{key}.{n.replace(' ', '_')}.of_memcpy": r for n, r in row["of_memcpy"].items()}
    torch.set_num_threads(before)
    print("(ratios: memcpy's time over the contender's, the same bytes; 1.00 is as fast as memcpy)")
    figures["detect_100_layers_ms"] = detection()
    print(f"format of 100 layers found in {figures['detect_100_layers_ms']:.2f} ms")
    return figures


if __name__ == "__main__":
    run()
