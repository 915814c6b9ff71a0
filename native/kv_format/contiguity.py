# SPDX-License-Identifier: Apache-2.0
"""From a tensor as an engine shows it to the same memory in its physical order, without copying.

Engines show head-first storage through token-first views and the reverse. A leaf's axes are sorted by stride; what
comes out has no gap but between its outermost axes, and no overlap. Errors: `LayoutError`, with shape and strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from semkv.native.kv_format.types import DiscoverableKVCache, LayoutError


def as_lists(kv_caches: Any) -> DiscoverableKVCache:
    """Tuples and dicts (in their order) become lists; anything that holds no tensors is refused."""
    if isinstance(kv_caches, torch.Tensor):
        return kv_caches
    if isinstance(kv_caches, Mapping):
        kv_caches = list(kv_caches.values())
    if isinstance(kv_caches, list | tuple):
        if not kv_caches:
            raise LayoutError("an empty list holds no KV cache")
        return [as_lists(entry) for entry in kv_caches]
    raise LayoutError(f"a KV cache is made of tensors in lists, tuples or dicts, not of {type(kv_caches).__name__}")


def leaves(kv_caches: DiscoverableKVCache) -> Iterator[torch.Tensor]:
    """Every tensor, in order."""
    if isinstance(kv_caches, torch.Tensor):
        yield kv_caches
        return
    for entry in kv_caches:
        yield from leaves(entry)


def measure_list_depth_until_tensor(kv_caches: DiscoverableKVCache) -> tuple[int, int, torch.Tensor]:
    """(depth of lists, rank of the first tensor, that tensor). Every branch must be equally deep."""
    depths = {depth for depth, _ in _depths(kv_caches, 0)}
    if len(depths) != 1:
        raise LayoutError(f"KV caches nested to different depths ({sorted(depths)}): no known engine does that")
    first = next(leaves(kv_caches))
    return depths.pop(), first.dim(), first


def _depths(kv_caches: DiscoverableKVCache, depth: int) -> Iterator[tuple[int, torch.Tensor]]:
    if isinstance(kv_caches, torch.Tensor):
        yield depth, kv_caches
        return
    if not kv_caches:
        raise LayoutError("an empty list holds no KV cache")
    for entry in kv_caches:
        yield from _depths(entry, depth + 1)


def attempt_permute_to_contiguous_view(
    kv_caches: DiscoverableKVCache, padded_axes: int | None = 1
) -> DiscoverableKVCache:
    """Every leaf in physical order. Gaps may follow only the first `padded_axes` axes; None means as many as its rank
    allows an engine (see `engine_padded_axes`). Returns fresh lists and views; never copies."""
    if isinstance(kv_caches, torch.Tensor):
        return _physical(kv_caches, engine_padded_axes(kv_caches) if padded_axes is None else padded_axes)
    return [attempt_permute_to_contiguous_view(entry, padded_axes) for entry in kv_caches]


def engine_padded_axes(tensor: torch.Tensor) -> int:
    """The axes that may stand outside a block: NB; with TWO from rank 5; with NL or TWO and a head axis from rank 6."""
    return {5: 2, 6: 3}.get(tensor.dim(), 1)


def _physical(tensor: torch.Tensor, padded_axes: int) -> torch.Tensor:
    if tensor.dim() == 0:
        raise LayoutError("a 0-dimensional tensor is no KV cache")
    view = tensor.permute(_order(tensor))
    _check_gaps(view, padded_axes)
    return view


def _order(tensor: torch.Tensor) -> list[int]:
    """Axes by stride, widest first. On equal strides a size-1 axis goes inside the other: it repeats that axis's step.

    A leading size-1 axis stays in front: one block, one layer or one plane has a stride that nothing ever uses.
    """
    shape, stride = tensor.shape, tensor.stride()
    fixed = 1 if shape[0] == 1 else 0
    rest = sorted(range(fixed, tensor.dim()), key=lambda axis: (-stride[axis], shape[axis] == 1))
    return [*range(fixed), *rest]


def _check_gaps(view: torch.Tensor, padded_axes: int) -> None:
    shape, stride = tuple(view.shape), view.stride()
    inner = 1  # elements that one step of the next axis must at least pass over
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        if stride[axis] < inner:
            raise LayoutError(
                f"shape {shape} with strides {stride}: axis {axis} overlaps what lies inside it; no KV cache does that"
            )
        if stride[axis] > inner and axis >= padded_axes:
            raise LayoutError(
                f"shape {shape} with strides {stride}: a gap inside axis {axis}; dim-0 padding only, that is gaps "
                f"between the outermost {padded_axes} axes"
            )
        inner = stride[axis] * shape[axis]


def assert_contiguous(tensor: torch.Tensor) -> None:
    """Raises unless the tensor starts its storage and has no gaps."""
    if tensor.storage_offset() != 0:
        raise LayoutError(f"expected storage offset 0, got {tensor.storage_offset()}")
    if not tensor.is_contiguous():
        raise LayoutError(f"shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")
