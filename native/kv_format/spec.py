# SPDX-License-Identifier: Apache-2.0
"""What a format means: the base of the files in specs/.

A format's name says how its lists and axes nest (native/core/kv_format.h), so almost every answer can be derived from
it; a spec file states the format, who produces it, and what its name cannot say. A spec holds normalized KV caches.
Errors: `LayoutError` when a question has no answer for a layout, or a tensor does not fit its format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from semkv.native.extension import core
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, LayoutError, PlaneView

_SHOWN = {"ONE": "1", "TWO": "2", "NBBS": "PBS", "BSV": "BSxVALS", "BSS": "BSxSCALES", "C0": "16", "NZ": "NH*HS/16"}
_OUTER = ("NB", "NL")  # axes that lie outside a block's run of one layer


def parse_name(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(list levels from the outside in, axes of a tensor) of a format's name."""
    *levels, axes = name.split("_X_")
    return tuple(levels), tuple(axes.split("_"))


def render_shape(name: str, token: Callable[[str], str]) -> str:
    """`5 x [7, 3, 4]` and its like, `token` giving the text of each label."""
    levels, axes = parse_name(name)
    return "".join(f"{token(level)} x " for level in levels) + "[" + ", ".join(token(axis) for axis in axes) + "]"


class KVFormatSpec:
    """The meaning of one format. Subclasses set `format` and `producers`, and override what differs."""

    format: ClassVar[EngineKVFormat]
    producers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, kv_caches: DiscoverableKVCache) -> None:
        self.kv_caches = kv_caches

    # What the format fixes.

    @classmethod
    def levels(cls) -> tuple[str, ...]:
        return parse_name(cls.format.name)[0]

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        return parse_name(cls.format.name)[1]

    @classmethod
    def joined(cls) -> bool:
        """Whether keys and values are an axis inside a token: its row then holds both, and there is one plane."""
        before = _before_two(cls.axes())
        if not {"BS", "NBBS"} & set(before):
            return False
        if core().kv_size(cls.format) != 1:
            raise LayoutError(
                f"{cls.format.name}: keys and values lie inside a token, in one row of an object: set its kv_size in "
                "native/core/kv_format.h to 1"
            )
        return True

    @classmethod
    def describe(cls) -> str:
        """The shape in words, as `NL x [2, NB, BS, NH, HS]`."""
        return render_shape(cls.format.name, lambda label: _SHOWN.get(label, label))

    @classmethod
    def paged_layer_shape(cls, nb: int, bs: int, nh: int, hs: int) -> tuple[int, ...]:
        """The shape of one layer's tensor rebuilt from a pointer."""
        if cls.levels() != ("NL",):
            raise LayoutError(f"{cls.format.name}: a layer is not one tensor")
        size = {"NB": nb, "BS": bs, "NH": nh, "HS": hs, "CS": hs, "TWO": 2, "ONE": 1, "NBBS": nb * bs}
        return tuple(size[axis] for axis in cls._layer_axes())

    @classmethod
    def _layer_axes(cls) -> tuple[str, ...]:
        return cls.axes()

    @property
    def kv_size(self) -> int:
        return int(core().kv_size(self.format))

    # Where things are.

    def layer_tensors(self, layer_idx: int = 0) -> list[torch.Tensor]:
        """The tensors of one layer: one, or one a plane. A cross-layer tensor stands for each of its layers."""
        caches = self.kv_caches
        if isinstance(caches, torch.Tensor):
            return [caches]
        if self.levels()[0] == "TWO":
            return [_tensor(half[layer_idx]) for half in caches if isinstance(half, list)]
        entry = caches[layer_idx]
        return [entry] if isinstance(entry, torch.Tensor) else [_tensor(plane) for plane in entry]

    def size(self, label: str, layer_idx: int = 0) -> int:
        """The extent of a labelled axis."""
        if label not in self.axes():
            raise LayoutError(f"{self.format.name} has no axis {label}")
        return int(self.layer_tensors(layer_idx)[0].shape[self.axes().index(label)])

    # The answers.

    def num_layers(self) -> int:
        if isinstance(self.kv_caches, torch.Tensor):
            return self.size("NL")
        half = self.kv_caches[0]
        return len(half) if self.levels()[0] == "TWO" and isinstance(half, list) else len(self.kv_caches)

    def num_blocks(self, layer_idx: int = 0) -> int:
        if "NB" not in self.axes():
            raise LayoutError(f"{self.format.name}: num_blocks is not in the shape, blocks and tokens share an axis")
        return self.size("NB", layer_idx)

    def block_size(self, layer_idx: int = 0) -> int:
        if "BS" not in self.axes():
            raise LayoutError(f"{self.format.name}: block_size is not in the shape, blocks and tokens share an axis")
        return self.size("BS", layer_idx)

    def page_buffer_size(self) -> int:
        return self.size("NBBS") if "NBBS" in self.axes() else self.num_blocks() * self.block_size()

    def num_heads(self, layer_idx: int = 0) -> int:
        return self.size("NH", layer_idx) if "NH" in self.axes() else 1

    def head_size(self, layer_idx: int = 0) -> int:
        return self.size("CS" if "CS" in self.axes() else "HS", layer_idx)

    def hidden_dim(self, layer_idx: int = 0) -> int:
        return self.num_heads(layer_idx) * self.head_size(layer_idx) * (2 if self.joined() else 1)

    def tokens_per_layer(self) -> int:
        return self.page_buffer_size()

    def elements_per_layer(self) -> int:
        """Elements of layer 0, keys and values together."""
        total = sum(int(tensor.numel()) for tensor in self.layer_tensors(0))
        return total // self.num_layers() if "NL" in self.axes() else total

    def dtype(self, layer_idx: int = 0) -> torch.dtype:
        return self.layer_tensors(layer_idx)[0].dtype

    def data_ptrs(self, layer_indices: Sequence[int]) -> list[int]:
        """Base addresses in the order that pointer tables have: all K then all V, or each layer's planes together."""
        if isinstance(self.kv_caches, torch.Tensor):
            return [self.kv_caches.data_ptr()]
        by_layer = [self.layer_tensors(layer) for layer in layer_indices]
        if self.levels()[0] == "TWO":
            return [tensors[half].data_ptr() for half in range(2) for tensors in by_layer]
        return [tensor.data_ptr() for tensors in by_layer for tensor in tensors]

    def concrete_shape_str(self) -> str:
        return render_shape(self.format.name, self._concrete)

    def _concrete(self, label: str) -> str:
        if label in ("ONE", "TWO"):
            return _SHOWN[label]
        answers: dict[str, Callable[[], int]] = {
            "NL": self.num_layers,
            "NB": self.num_blocks,
            "NBBS": self.page_buffer_size,
            "BS": self.block_size,
            "NH": self.num_heads,
            "HS": self.head_size,
            "CS": self.head_size,
        }
        return str(answers[label]()) if label in answers else str(self.size(label))

    # Addresses, for transfers and descriptors.

    def block_stride(self, layer_idx: int = 0) -> int | None:
        """Elements from one block to the next, or None where blocks are not an axis."""
        if "NB" not in self.axes():
            return None
        return int(self.layer_tensors(layer_idx)[0].stride(self.axes().index("NB")))

    def planes(self, layer_idx: int = 0, block_size: int | None = None) -> list[PlaneView]:
        """The planes of one layer: K then V, or the planes as they come. `block_size` where the shape has none."""
        self._refuse_halves_inside()
        views = []
        for tensor in self.layer_tensors(layer_idx):
            view, axes = tensor, list(self.axes())
            if "NL" in axes:
                view = view.select(axes.index("NL"), layer_idx)
                axes.remove("NL")
            if self.joined():  # with the axis after it: twice the heads, or heads twice as wide
                at = axes.index("TWO")
                view = view.flatten(at, at + 1)
                axes.remove("TWO")
            for part in view.unbind(axes.index("TWO")) if "TWO" in axes else (view,):
                views.append(self._plane(part, [axis for axis in axes if axis != "TWO"], block_size))
        return views

    def _plane(self, part: torch.Tensor, axes: list[str], block_size: int | None) -> PlaneView:
        size = part.element_size()
        extent = dict(zip(axes, part.shape, strict=True))
        step = dict(zip(axes, (s * size for s in part.stride()), strict=True))
        if "NBBS" in extent:
            tokens, token_stride = self._split(extent["NBBS"], block_size), step["NBBS"]
            blocks, block_stride = extent["NBBS"] // tokens, tokens * token_stride
        else:
            tokens, token_stride = extent["BS"], step["BS"]
            blocks, block_stride = extent["NB"], step["NB"]
        width = "CS" if "CS" in extent else "HS"
        return PlaneView(
            base=part.data_ptr(),
            blocks=blocks,
            block_size=tokens,
            heads=extent.get("NH", 1),
            head_bytes=extent[width] * size,
            block_stride=block_stride,
            token_stride=token_stride,
            head_stride=step.get("NH", extent[width] * size),
            block_bytes=tokens * extent.get("NH", 1) * extent[width] * size,
            itemsize=size,
        )

    def _split(self, tokens: int, block_size: int | None) -> int:
        if not block_size:
            raise LayoutError(f"{self.format.name}: blocks and tokens share an axis; give the block size")
        if tokens % block_size:
            raise LayoutError(f"{self.format.name}: {tokens} slots are not whole blocks of {block_size} tokens")
        return block_size

    # What detection checks of every layer.

    def check(self) -> None:
        """Raises LayoutError when some layer does not fit the format: rank, fixed axes, gaps inside a block."""
        axes = self.axes()
        for layer in range(self.num_layers()):
            for tensor in self.layer_tensors(layer):
                where = f"{self.format.name}, layer {layer}: shape {tuple(tensor.shape)}"
                if tensor.dim() != self._rank():
                    raise LayoutError(f"{where} has {tensor.dim()} axes, the format {self._rank()}")
                for axis, fixed in (("TWO", 2), ("ONE", 1), ("C0", 16)):
                    if axis in axes and tensor.shape[axes.index(axis)] != fixed:
                        raise LayoutError(f"{where}: axis {axes.index(axis)} must be {fixed}")
                self._check_inside(tensor, where)

    def _rank(self) -> int:
        return len(self.axes())

    def _check_inside(self, tensor: torch.Tensor, where: str) -> None:
        self._refuse_halves_inside()
        outer = _OUTER if self.joined() else (*_OUTER, "TWO")
        inner = [index for index, label in enumerate(self.axes()) if label not in outer]
        refuse_gaps(tensor, inner, where)

    def _refuse_halves_inside(self) -> None:
        """A block whose tokens lie in halves, keys then values, is more than a name can say."""
        if set(_before_two(self.axes())) - set(_OUTER) and not self.joined():
            raise LayoutError(
                f"{self.format.name}: keys and values halve a block's {' '.join(_before_two(self.axes())[1:])} before "
                f"its tokens, which cannot be derived from the name: override planes() and _check_inside() in its file "
                "in native/kv_format/specs"
            )


def _before_two(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes outside that of keys and values; none where there is no such axis."""
    return axes[: axes.index("TWO")] if "TWO" in axes else ()


def refuse_gaps(tensor: torch.Tensor, inner: Sequence[int], where: str) -> None:
    """Raises when the axes that lie inside a block leave gaps between them."""
    if tensor.numel() == 0:
        return
    expected = 1
    for index in reversed(inner):
        if tensor.shape[index] != 1 and tensor.stride(index) != expected:
            raise LayoutError(
                f"{where} with strides {tensor.stride()}: a gap inside a block at axis {index}; dim-0 padding only, "
                "that is gaps between blocks"
            )
        expected *= tensor.shape[index]


def _tensor(entry: DiscoverableKVCache) -> torch.Tensor:
    if not isinstance(entry, torch.Tensor):
        raise LayoutError("lists nested deeper than the format's name says")
    return entry
