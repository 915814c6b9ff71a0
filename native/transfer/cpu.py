# SPDX-License-Identifier: Apache-2.0
"""Transfers in CPU memory, gathered straight into the object and scattered straight out of it by the C++ core.

No temporaries; the GIL is released; ids, slots and sizes are checked before a byte moves (IndexError, ValueError). Any
thread; calls that write the same memory are the caller's to keep apart. A transfer keeps its tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from semkv.native.extension import core
from semkv.native.kv_format.descriptors import get_device
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError
from semkv.native.transfer.plan import block_plan, row_plan

if TYPE_CHECKING:
    from semkv.native._core import Stores

Ids: TypeAlias = "torch.Tensor | Sequence[int]"


class _CpuTransfer:
    """What both kinds share: the tensors, how an object is named, and the knobs."""

    def __init__(self, kv_caches: DiscoverableKVCache, *, threads: int, stores: str) -> None:
        if get_device(kv_caches).type != "cpu":
            raise LayoutError(f"KV caches on {get_device(kv_caches)}: this transfer is for CPU memory")
        self.kv_caches = kv_caches
        self.threads = threads
        self._core = core()
        self._stores: Stores = self._core.Stores[stores]

    @property
    def _knobs(self) -> dict[str, Any]:
        return {"threads": self.threads, "stores": self._stores}


class RowTransfer(_CpuTransfer):
    """Objects of token rows, [kv][layer][token][row]: for every format but opaque pages."""

    def __init__(
        self,
        kv_caches: DiscoverableKVCache,
        fmt: EngineKVFormat,
        *,
        block_size: int | None = None,
        threads: int = 1,
        stores: str = "automatic",
    ) -> None:
        super().__init__(kv_caches, threads=threads, stores=stores)
        self.plan = row_plan(kv_caches, fmt, block_size)
        self._copier = self._core.RowCopier(self.plan.planes, self.plan.block_size, self.plan.bytes_per_token)

    def object_bytes(self, tokens: int) -> int:
        return tokens * self.plan.bytes_per_token

    def gather(self, ids: Ids, tokens: int, obj: torch.Tensor, *, skip_tokens: int = 0) -> None:
        """Pages to object. `ids` are the blocks of all `tokens`; the first `skip_tokens` are not moved."""
        self._blocks(self._core.Direction.gather, ids, tokens, obj, skip_tokens)

    def scatter(self, ids: Ids, tokens: int, obj: torch.Tensor, *, skip_tokens: int = 0) -> None:
        """Object to pages."""
        self._blocks(self._core.Direction.scatter, ids, tokens, obj, skip_tokens)

    def gather_slots(self, slots: Ids, obj: torch.Tensor, *, skip_tokens: int = 0) -> None:
        """Pages to object, token by token; a slot of -1 leaves its row as it is."""
        self._slots(self._core.Direction.gather, slots, obj, skip_tokens)

    def scatter_slots(self, slots: Ids, obj: torch.Tensor, *, skip_tokens: int = 0) -> None:
        self._slots(self._core.Direction.scatter, slots, obj, skip_tokens)

    def _blocks(self, direction: Any, ids: Ids, tokens: int, obj: torch.Tensor, skip: int) -> None:
        self._copier.copy_blocks(direction, as_ids(ids), tokens, *span(obj), skip=skip, **self._knobs)

    def _slots(self, direction: Any, slots: Ids, obj: torch.Tensor, skip: int) -> None:
        self._copier.copy_slots(direction, as_ids(slots), *span(obj), skip=skip, **self._knobs)


class BlockTransfer(_CpuTransfer):
    """Objects of the engine's own blocks, [kv][layer][plane][block]: for every format, opaque pages too."""

    def __init__(
        self,
        kv_caches: DiscoverableKVCache,
        fmt: EngineKVFormat,
        *,
        block_size: int | None = None,
        threads: int = 1,
        stores: str = "automatic",
    ) -> None:
        super().__init__(kv_caches, threads=threads, stores=stores)
        self.plan = block_plan(kv_caches, fmt, block_size)
        self._copier = self._core.BlockCopier(self.plan.planes)

    def object_bytes(self, blocks: int) -> int:
        return int(self._copier.object_bytes(blocks))

    def gather(self, ids: Ids, obj: torch.Tensor, *, skip_blocks: int = 0) -> None:
        """Pages to object. The object holds all of `ids`; the first `skip_blocks` are not moved."""
        self._copier.copy_ids(self._core.Direction.gather, as_ids(ids), *span(obj), skip=skip_blocks, **self._knobs)

    def scatter(self, ids: Ids, obj: torch.Tensor, *, skip_blocks: int = 0) -> None:
        """Object to pages."""
        self._copier.copy_ids(self._core.Direction.scatter, as_ids(ids), *span(obj), skip=skip_blocks, **self._knobs)

    def gather_range(
        self, slots: torch.Tensor, start: int, end: int, address: int, size: int, *, skip_blocks: int = 0
    ) -> None:
        """Pages to the object at `address`, for tokens [start, end) of a request with these slots, in whole blocks."""
        self._range(self._core.Direction.gather, slots, start, end, address, size, skip_blocks)

    def scatter_range(
        self, slots: torch.Tensor, start: int, end: int, address: int, size: int, *, skip_blocks: int = 0
    ) -> None:
        self._range(self._core.Direction.scatter, slots, start, end, address, size, skip_blocks)

    def _range(self, direction: Any, slots: torch.Tensor, *where: int) -> None:
        start, end, address, size, skip = where
        self._copier.copy_slots(
            direction, as_ids(slots), start, end, self.plan.block_size, address, size, skip=skip, **self._knobs
        )


def as_ids(ids: Ids) -> torch.Tensor:
    """Ids as the core takes them: one axis of 64-bit integers in CPU memory, without gaps."""
    tensor = ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids), dtype=torch.int64)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        raise TypeError(f"ids must be integers, not {tensor.dtype}")
    return tensor.to(device="cpu", dtype=torch.int64).contiguous()


def span(obj: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of an object's memory."""
    if obj.device.type != "cpu":
        raise LayoutError(f"the object is on {obj.device}, not in CPU memory")
    if not obj.is_contiguous():
        raise LayoutError(f"the object, of shape {tuple(obj.shape)} and strides {obj.stride()}, has gaps")
    return obj.data_ptr(), obj.numel() * obj.element_size()
