# SPDX-License-Identifier: Apache-2.0
"""Views in physical order: same memory, no copy, gaps only between the outermost axes."""

from __future__ import annotations

import pytest
import torch

from semkv.native.layout import LayoutError, assert_contiguous, attempt_permute_to_contiguous_view, get_device


def strided(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    need = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    return torch.zeros(max(need, 1)).as_strided(shape, stride, offset)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.zeros(2, 7, 3, 2, 4), (2, 7, 3, 2, 4)),
        (torch.zeros(2, 7, 2, 3, 4).transpose(2, 3), (2, 7, 2, 3, 4)),  # heads-first storage shown tokens first
        (torch.zeros(7, 2, 3, 2, 4).transpose(0, 1), (7, 2, 3, 2, 4)),  # blocks-first storage shown K/V first
        (torch.zeros(2, 7, 1, 3, 4).transpose(2, 3), (2, 7, 1, 3, 4)),  # one head: torch calls this contiguous
        (strided((8, 1, 1, 32), (32, 1, 1, 1)), (8, 32, 1, 1)),
        (strided((8, 1, 16, 32), (512, 32, 32, 1)), (8, 16, 1, 32)),
        (strided((8, 1, 16, 32), (1024, 32, 32, 1)), (8, 16, 1, 32)),
        (strided((5, 3, 8), (40, 8, 1), 3), (5, 3, 8)),  # padded, with an offset
        (torch.zeros(6, 3, 8)[:, :2], (6, 2, 8)),
        (torch.zeros(6, 3, 8)[::2], (3, 3, 8)),
        (torch.zeros(7, 2, 3, 4)[:, 1], (7, 3, 4)),
        (strided((1, 3, 8), (40, 8, 1)), (1, 3, 8)),  # one padded block
        (strided((1, 3, 8), (1, 8, 1)), (1, 3, 8)),  # one block, whose stride nothing uses
        (torch.zeros(2, 0, 3, 2, 4), (2, 0, 3, 2, 4)),
        (torch.zeros(2, 0, 2, 3, 4).transpose(2, 3), (2, 0, 2, 3, 4)),  # no blocks: their order shows all the same
        (torch.zeros(0, 2, 3, 2, 4).transpose(0, 1), (0, 2, 3, 2, 4)),
    ],
)
def test_physical_order(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    view = attempt_permute_to_contiguous_view(tensor)
    assert isinstance(view, torch.Tensor)
    assert view.shape == shape
    assert view.data_ptr() == tensor.data_ptr()
    assert view.numel() == tensor.numel()


@pytest.mark.parametrize(
    "tensor",
    [
        strided((5, 3, 8), (48, 16, 1)),
        torch.zeros(5, 3, 8)[..., :4],
        torch.zeros(5, 3, 8)[..., ::2],
        torch.zeros(5, 1, 8).expand(5, 3, 8),
        strided((5, 3, 8), (8, 8, 1)),
        torch.zeros(16)[::2],
        torch.zeros(7, 2, 3, 8)[..., :4],  # the K half of heads that hold K and V
    ],
)
def test_gaps_and_overlaps_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"dim-0 padding only|overlaps"):
        attempt_permute_to_contiguous_view(tensor, padded_axes=1 if tensor.dim() > 1 else 0)


def test_no_dimension_is_refused() -> None:
    with pytest.raises(LayoutError, match="0-dimensional"):
        attempt_permute_to_contiguous_view(torch.zeros(()))


def test_lists_are_fresh() -> None:
    cache = [[torch.zeros(2, 3)], [torch.zeros(2, 3)]]
    view = attempt_permute_to_contiguous_view(cache)  # type: ignore[arg-type]
    assert view is not cache
    assert view[0] is not cache[0]


def test_small_questions() -> None:
    assert_contiguous(torch.zeros(3, 4))
    for tensor, message in ((torch.zeros(4)[1:], "offset"), (torch.zeros(4, 4)[:, :2], "not contiguous")):
        with pytest.raises(LayoutError, match=message):
            assert_contiguous(tensor)
    assert get_device([torch.zeros(1), [torch.zeros(1)]]) == torch.device("cpu")
    with pytest.raises(LayoutError, match="several devices"):
        get_device([torch.zeros(1), torch.zeros(1, device="meta")])
