# SPDX-License-Identifier: Apache-2.0
"""Groups of layers as one line of text, and back: `(kv,nb,bs,nh,hs):dtype:layers`, groups joined by `;`.

The text is what LMCache's command line takes, so that a geometry can be named without an engine. It says nothing of the
format, nor of addresses. Layers are numbered as the groups follow one another. What `format` writes, `parse` reads as
the same groups. Errors: `LayoutError` naming the group, the field and the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semkv.native.kv_format.groups import KernelGroupInfo
from semkv.native.kv_format.types import LayoutError, PageBufferShapeDesc

DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
SIZES = ("kv_size", "nb", "bs", "nh", "hs")
MAX_LAYERS = 4096  # of all groups: the text comes from a person, a list is made from its number


def parse_kvcache_shape_spec(spec_str: str) -> list[KernelGroupInfo]:
    """The groups that the text names. A trailing `;` and spaces mean nothing; dtype names have any case."""
    texts = [text.strip() for text in spec_str.split(";")]
    groups: list[KernelGroupInfo] = []
    first = 0
    for text in filter(None, texts):
        desc = _desc(text, first)
        layers = list(range(first, first + desc.nl))
        dtype = desc.dtype
        assert dtype is not None
        groups.append(KernelGroupInfo(layers, desc, dtype, None, tokens_per_block=desc.bs))
        first += desc.nl
    if not groups:
        raise LayoutError("a shape spec needs at least one group, like (2,1024,16,8,128):float16:32")
    return groups


def format_kvcache_shape_spec(groups: Sequence[KernelGroupInfo]) -> str:
    """The text for these groups."""
    if not groups:
        raise LayoutError("no groups to write as a shape spec")
    names = {dtype: name for name, dtype in DTYPES.items()}
    parts = []
    for number, group in enumerate(groups):
        if group.dtype not in names:
            raise LayoutError(
                f"group {number}: {group.dtype} has no name in a shape spec; it knows {', '.join(DTYPES)}"
            )
        d = group.shape_desc
        parts.append(f"({d.kv_size},{d.nb},{d.bs},{d.nh},{d.hs}):{names[group.dtype]}:{d.nl}")
    return ";".join(parts)


def _desc(text: str, layers_before: int) -> PageBufferShapeDesc:
    shape, closed, rest = text.partition(")")
    parts = rest.split(":")
    if not text.startswith("(") or not closed or len(parts) != 3 or parts[0].strip():
        raise LayoutError(f"group {text!r} is not (kv_size,nb,bs,nh,hs):dtype:layers")
    sizes = shape[1:].split(",")
    if len(sizes) != len(SIZES):
        raise LayoutError(f"group {text!r} has {len(sizes)} sizes, not the five {', '.join(SIZES)}")
    kv_size, nb, bs, nh, hs = (_positive(size, name, text) for size, name in zip(sizes, SIZES, strict=True))
    if kv_size > 2:
        raise LayoutError(f"group {text!r}: kv_size {kv_size} is neither 1 nor 2")
    name = parts[1].strip().lower()
    if name not in DTYPES:
        raise LayoutError(f"group {text!r}: dtype {parts[1].strip()!r} is none of {', '.join(DTYPES)}")
    layers = _positive(parts[2], "layers", text)
    if layers_before + layers > MAX_LAYERS:
        raise LayoutError(f"group {text!r}: {layers_before + layers} layers in all; at most {MAX_LAYERS}")
    dtype = DTYPES[name]
    return PageBufferShapeDesc(kv_size, layers, nb, bs, nh, hs, dtype.itemsize, dtype=dtype)


def _positive(text: str, name: str, group: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18 and int(digits) > 0):
        raise LayoutError(f"group {group!r}: {name} {digits[:40]!r} is not a positive number")
    return int(digits)
