# SPDX-License-Identifier: Apache-2.0
"""Measures LMCache 0.5.6's torch fallback, ours, memcpy and a streaming copy in one process, for `native_fallback`.

A program: LMCache 0.5.6 must be what `import lmcache` finds. Three of its ways from pages to objects and back, each as
LMCache calls it, and each checked to make the same object as ours before it is timed:

- `op`: the block operation alone, for one chunk: its tensors and descriptor made before, block ids in a list.
- `worker`: what its worker on a CPU calls for a request of four chunks (`gather_paged_kv_to_cpu` into objects that are
  there already, `scatter_cpu_to_paged_kv`), a fourth of it. Finding the format is part of it.
- `slots`: the token operation that its connectors inside the engine call for a chunk, with pointers and a slot for
  each token. It does not know pages with heads first, packed heads, or K and V in tensors of their own.

Ours is the row transfer by block ids, for `slots` the one by slots. *Cold*: a pool of pages and a rotation of objects
far larger than the caches, other blocks for each call, as in an engine. *Hot*: one object and the same blocks again
and again. Each figure is the fastest of interleaved rounds: on one thread in processor time, which what else runs on
the machine does not count in, on two in wall time.

The fallback gathers into a temporary as large as a chunk. What that costs is up to malloc, which may keep the memory or
give it back to the system and be given empty pages for it the next time; which of them depends on all that the process
allocated before. `native_fallback` starts this program for either: the arguments are the name of the way and the
states to measure. Prints FIGURES and JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from bench.native_copy import BLOCK, DTYPE, LAYERS, fastest_ms, memcpy, pages, streaming_copy
from bench.native_fallback import LMCACHE, SAYS
from semkv.native.layout import EngineKVFormat
from semkv.native.transfer.cpu import RowTransfer

F = EngineKVFormat
POOL = {False: 256, True: 768}  # blocks a layer, for K and V and for latents: about 0.5 GiB
TOKENS, REQUEST, ROTATION = 256, 4, 256 << 20
ROUNDS = {"cold": 7, "hot": 3}
GEOMETRY = {  # segments of the object, elements of a token's row in one, the layout's name, whether `slots` knows it
    F.NL_X_TWO_NB_BS_NH_HS: (2, 1024, "NHD", True),
    F.NL_X_NB_TWO_BS_NH_HS: (2, 1024, "NHD", True),
    F.NL_X_TWO_NB_NH_BS_HS: (2, 1024, "HND", False),
    F.NL_X_NB_NH_BS_CS: (1, 2048, "HND", False),
    F.NL_X_TWO_X_NB_BS_NH_HS: (2, 1024, "NHD", False),
    F.NL_X_NB_BS_HS: (1, 576, "NHD", True),
}


class Setting:
    """Pages, objects and block lists of one format; a call asks for its turn and gets others than the call before."""

    def __init__(self, fmt: EngineKVFormat, threads: int) -> None:
        self.fmt, self.threads = fmt, threads
        self.segments, self.width, self.named, self.by_slots = GEOMETRY[fmt]
        self.blocks = POOL[fmt == F.NL_X_NB_BS_HS]
        self.cache: list[Any] = pages(fmt, self.blocks)
        self.rows = RowTransfer(self.cache, fmt, threads=threads)
        self.size = self.rows.object_bytes(TOKENS)
        count = max(2 * REQUEST, ROTATION // self.size)
        self.objects = [torch.ones(self.size, dtype=torch.uint8) for _ in range(count)]
        generator = torch.Generator().manual_seed(2)
        self.ids = [torch.randperm(self.blocks, generator=generator)[: TOKENS // BLOCK] for _ in range(97)]
        self.cold = True
        self._turn = itertools.count()

    def turn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The block ids and the object of a call."""
        number = next(self._turn) if self.cold else 0
        return self.ids[number % len(self.ids)], self.objects[number % len(self.objects)]

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two objects of a call that copies one into the other."""
        number = next(self._turn) if self.cold else 0
        count = len(self.objects)
        return self.objects[number % count], self.objects[(number + count // 2) % count]

    def typed(self, obj: torch.Tensor) -> torch.Tensor:
        shape = (LAYERS, TOKENS, self.width) if self.segments == 1 else (2, LAYERS, TOKENS, self.width)
        return obj.view(DTYPE).view(shape)

    def contenders(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """By name: how many chunks a call moves, and the call."""

        def ours_gather() -> None:
            ids, obj = self.turn()
            self.rows.gather(ids, TOKENS, obj)

        def ours_scatter() -> None:
            ids, obj = self.turn()
            self.rows.scatter(ids, TOKENS, obj)

        calls: dict[str, tuple[int, Callable[[], None]]] = {
            "memcpy": (1, lambda: memcpy(*self.pair())),
            "streaming": (1, lambda: streaming_copy(*self.pair(), self.threads)),
            "ours gather": (1, ours_gather),
            "ours scatter": (1, ours_scatter),
        }
        theirs = Theirs(self)
        for direction in ("gather", "scatter"):
            calls[f"op {direction}"] = (1, lambda d=direction: theirs.op(d, *self.turn()))
            calls[f"worker {direction}"] = (
                REQUEST,
                lambda d=direction: theirs.worker(d, [self.turn() for _ in range(REQUEST)]),
            )
            if self.by_slots:
                ours = getattr(self.rows, f"{direction}_slots")
                calls[f"ours slots {direction}"] = (1, lambda move=ours: _by_slots(move, *self.turn()))
                calls[f"slots {direction}"] = (1, lambda d=direction: theirs.slots(d, *self.turn()))
        return calls


def slots_of(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)


def _by_slots(move: Callable[[torch.Tensor, torch.Tensor], None], ids: torch.Tensor, obj: torch.Tensor) -> None:
    move(slots_of(ids), obj)


class Theirs:
    """LMCache's three ways, for one setting."""

    def __init__(self, setting: Setting) -> None:
        import lmcache.lmcache_native as native
        from lmcache.v1.gpu_connector.utils import make_page_buffer_shape_desc
        from lmcache.v1.multiprocess.transfer_context import base
        from lmcache.v1.platform import resolve_device_ops

        self.setting, self.base = setting, base
        self.ops = resolve_device_ops("cpu")
        self.device = torch.device("cpu")
        self.format = native.EngineKVFormat(int(setting.fmt))
        directions = native.TransferDirection
        self.direction = {"gather": directions.D2H, "scatter": directions.H2D}
        self.by_name = {str(index): entry for index, entry in enumerate(setting.cache)}
        if setting.fmt == F.NL_X_TWO_X_NB_BS_NH_HS:
            self.by_name = {name: tuple(entry) for name, entry in self.by_name.items()}
        self.described = make_page_buffer_shape_desc(
            setting.cache,
            self.format,
            layer_idx=0,
            num_layers_in_group=LAYERS,
            num_blocks=setting.blocks,
            block_size=BLOCK,
        )
        if setting.by_slots:
            self.pointers = torch.tensor([entry.data_ptr() for entry in setting.cache], dtype=torch.int64)

    def op(self, direction: str, ids: torch.Tensor, obj: torch.Tensor) -> None:
        self.ops.multi_layer_block_kv_transfer(
            self.setting.cache,
            [self.setting.typed(obj)],
            ids.tolist(),
            self.device,
            self.direction[direction],
            self.described,
            TOKENS,
            self.format,
            0,
        )

    def worker(self, direction: str, chunks: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        ids = [block for chunk, _ in chunks for block in chunk.tolist()]
        objects = [self.setting.typed(obj) for _, obj in chunks]
        hints = {"kv_layout": self.setting.named}
        if direction == "gather":
            self.base.gather_paged_kv_to_cpu(
                self.by_name, ids, TOKENS // BLOCK, layout_hints=hints, engine_kv_format=self.format, out=objects
            )
        else:
            self.base.scatter_cpu_to_paged_kv(
                self.by_name, ids, objects, TOKENS // BLOCK, layout_hints=hints, engine_kv_format=self.format
            )

    def slots(self, direction: str, ids: torch.Tensor, obj: torch.Tensor) -> None:
        setting = self.setting
        self.ops.multi_layer_kv_transfer(
            obj.view(DTYPE).view(setting.segments, LAYERS, TOKENS, setting.width),
            self.pointers,
            slots_of(ids),
            self.device,
            setting.blocks * BLOCK,
            self.direction[direction],
            self.format,
            block_size=BLOCK,
            head_size=setting.width // 8,
        )


def check(setting: Setting) -> None:
    """All ways make the same object of the same pages."""
    theirs, ids = Theirs(setting), setting.ids[0]
    tensors = [tensor for entry in setting.cache for tensor in (entry if isinstance(entry, list) else [entry])]
    pattern = torch.arange(tensors[0].numel(), dtype=torch.int32).to(torch.int16).view(tensors[0].shape)
    for number, tensor in enumerate(tensors):
        torch.add(pattern, number, out=tensor.view(torch.int16))
    wanted, *objects = setting.objects[: 1 + REQUEST]
    setting.rows.gather(ids, TOKENS, wanted)
    theirs.worker("gather", [(ids, obj) for obj in objects])
    if setting.by_slots:
        theirs.slots("gather", ids, objects[1])
    theirs.op("gather", ids, objects[0])
    if not all(torch.equal(wanted, obj) for obj in objects):
        raise RuntimeError(f"{setting.fmt.name}: the objects differ")


def measure(fmt: EngineKVFormat, threads: int, states: list[str]) -> dict[str, float]:
    setting = Setting(fmt, threads)
    torch.set_num_threads(threads)
    check(setting)
    calls = setting.contenders()
    figures: dict[str, float] = {}
    clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    for state in states:
        setting.cold = state == "cold"
        times = fastest_ms({name: call for name, (_, call) in calls.items()}, ROUNDS[state], clock)
        times = {name: value / calls[name][0] for name, value in times.items()}
        for name in ("streaming", "ours gather", "ours scatter"):
            figures[f"{state}.{name}.of_memcpy"] = times["memcpy"] / times[name]
        for direction in ("gather", "scatter"):
            for way in ("op", "worker", "slots"):
                if (theirs := times.get(f"{way} {direction}")) is None:
                    continue
                ours = times[f"ours {'slots ' if way == 'slots' else ''}{direction}"]
                figures[f"{state}.{direction}.{way}.over_ours"] = theirs / ours
                figures[f"{state}.{direction}.{way}.over_streaming"] = theirs / times["streaming"]
    return figures


def main() -> int:
    if (found := version("lmcache")) != LMCACHE:
        print(f"LMCache {found} was found, {LMCACHE} is needed", file=sys.stderr)
        return 2
    way, *states = sys.argv[1:]
    everything: dict[str, float] = {}
    for fmt, threads in itertools.product(GEOMETRY, (1, 2)):
        figures = measure(fmt, threads, states)
        everything |= {
            f"{fmt.name.lower()}.{threads}_threads.{way}.{key.replace(' ', '_')}": v for key, v in figures.items()
        }
    print(SAYS + json.dumps(everything), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
