# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6's torch fallback for the same blocks beside our row transfer, for `bench/native_copy.py`.

Not a benchmark of its own. Needs an unpacked wheel of LMCache 0.5.6; LMCache must not be imported before.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from semkv.native.layout import EngineKVFormat
from semkv.native.transfer.cpu import RowTransfer

F = EngineKVFormat
GEOMETRY = {  # planes, heads, elements of a token's row
    F.NL_X_TWO_NB_BS_NH_HS: (2, 8, 1024),
    F.NL_X_TWO_NB_NH_BS_HS: (2, 8, 1024),
    F.NL_X_NB_NH_BS_CS: (1, 8, 2048),
    F.NL_X_NB_BS_HS: (1, 1, 576),
}


def compare(folder: str, threads: int, tokens: int = 256) -> dict[str, float]:
    """Their time over ours, for gather and scatter of four chunks, after checking that the objects are the same."""
    from bench.native_copy import BLOCK, BLOCKS, LAYERS, fastest_ms, pages

    sys.path.insert(0, folder)
    kernels = importlib.import_module("lmcache.v1.platform.torch_ops.mp_mem_kernels")
    native = importlib.import_module("lmcache.lmcache_native")
    figures: dict[str, float] = {}
    torch.set_num_threads(threads)
    for fmt, (kv, heads, width) in GEOMETRY.items():
        cache: list[Any] = pages(fmt)
        rows = RowTransfer(cache, fmt, threads=threads)
        size = rows.object_bytes(tokens)
        ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))[: tokens // BLOCK]
        ours, theirs = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
        desc = native.PageBufferShapeDesc()
        sizes = {"kv_size": kv, "nl": LAYERS, "nb": BLOCKS, "bs": BLOCK, "nh": heads, "hs": width // heads}
        for name, value in (sizes | {"element_size": 2, "block_stride_elems": 0, "dtype": torch.bfloat16}).items():
            setattr(desc, name, value)
        shape = (LAYERS, tokens, width) if fmt == F.NL_X_NB_BS_HS else (kv, LAYERS, tokens, width)
        fixed = (cache, [theirs.view(torch.bfloat16).view(shape)], ids, desc, native.EngineKVFormat(int(fmt)))

        def move(direction: Any, fixed: Any = fixed) -> None:
            tensors, objects, blocks, described, number = fixed
            kernels.multi_layer_block_kv_transfer(
                tensors, objects, blocks, "cpu", direction, described, tokens, number, 0
            )

        to_host, to_device = native.TransferDirection.D2H, native.TransferDirection.H2D
        move(to_host)
        rows.gather(ids, tokens, ours)
        if not torch.equal(ours, theirs):
            raise RuntimeError(f"{fmt.name}: the objects differ")
        times = fastest_ms(
            {
                "ours gather": lambda r=rows, i=ids, o=ours: r.gather(i, tokens, o),
                "theirs gather": lambda m=move, d=to_host: m(d),
                "ours scatter": lambda r=rows, i=ids, o=ours: r.scatter(i, tokens, o),
                "theirs scatter": lambda m=move, d=to_device: m(d),
            },
            rounds=5,
        )
        for what in ("gather", "scatter"):
            ratio = times[f"theirs {what}"] / times[f"ours {what}"]
            figures[f"{fmt.name.lower()}.{tokens}_tokens.{threads}_threads.{what}.lmcache_fallback_over_ours"] = ratio
            print(f"{fmt.name:24} {what:8} {threads} thr: LMCache 0.5.6's torch fallback takes {ratio:6.1f} times ours")
    return figures
