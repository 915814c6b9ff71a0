# SPDX-License-Identifier: Apache-2.0
"""The DDR pool of an engine without an accelerator begins on a page boundary.

LMCache 0.4.3/0.4.4 takes that pool from an allocator that aligns to 64 bytes, so that O_DIRECT reads into it fail. The
pool is made one page larger and handed out from its first page boundary.

Threads: called once per pool, before it is used.
"""

from __future__ import annotations

import mmap

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement


def _make(_current: AnyFunction) -> AnyFunction:
    import lmcache.non_cuda_equivalents as equivalents
    import torch

    def alloc_pinned_ptr(size: int, device_id: int = 0) -> int:
        """Address of a new zeroed block that begins on a page boundary."""
        pinned = bool(getattr(equivalents, "_XPU_PIN_MEMORY", False))
        block = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=pinned)
        block.fill_(0)
        address = int(block.data_ptr())
        aligned = address + (-address % mmap.PAGESIZE)
        equivalents._tensor_registry[aligned] = block
        return aligned

    return alloc_pinned_ptr


PATCH = Patch(
    name="aligned_pool",
    reason="O_DIRECT reads into the pool of an engine without an accelerator fail",
    replacements=(
        Replacement("lmcache.non_cuda_equivalents:alloc_pinned_ptr", _make, frozenset({"892c59c93e1af1ed"})),
    ),
)
