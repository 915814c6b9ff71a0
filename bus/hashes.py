# SPDX-License-Identifier: Apache-2.0
"""Chunk hashes: one 64-bit pattern, one Python type, three forms on the outside.

A chunk hash is a plain signed `int` in Python (the form LMCache holds). Outside it is
- wire: 8 bytes each, big-endian two's complement, all hashes of a message in one binary value, in chain order;
- JSON and logs: 16 lower-case hex digits of the two's complement;
- legacy, as LMCache prints it (`f"{h:x}"`): a sign and no padding.

Both text forms are read everywhere; everything else (`0x`, spaces, `_`, capitals, empty text, non-text, numbers outside
64 bits) is a `HashError` that names the position and the value. Pure functions: any thread.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import cast

ChunkHash = int

MIN = -(1 << 63)
MAX = (1 << 63) - 1
MAX_PER_COMMAND = 4096
"""A command carries at most this many hashes; the client splits what is longer."""
MAX_PER_MESSAGE = 65536
"""No message of any type carries more: half a mebibyte of hashes."""

_WRAP = 1 << 64
_TEXT = re.compile(r"(?:[0-9a-f]{16}|0|-?[1-9a-f][0-9a-f]{0,15})\Z")
_SHOWN = 40


class HashError(ValueError):
    """A value that is no chunk hash. `position` is its index in the list it came in, `value` the value itself."""

    def __init__(self, reason: str, position: int = 0, value: object = None) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = shown[:_SHOWN] + "…"
        super().__init__(f"chunk hash at position {position}: {reason}: {shown}")
        self.position = position
        self.value = value


def _range_error(hashes: Sequence[object]) -> HashError:
    for position, value in enumerate(hashes):
        if isinstance(value, bool) or not isinstance(value, int):
            return HashError("expected a signed 64-bit int", position, value)
        if not MIN <= value <= MAX:
            return HashError("outside signed 64 bits", position, value)
    return HashError("not a list of signed 64-bit ints", 0, hashes)


def pack(hashes: Sequence[int]) -> bytes:
    """The wire form: 8 bytes each, big-endian two's complement."""
    try:
        return struct.pack(f">{len(hashes)}q", *hashes)
    except struct.error:
        raise _range_error(hashes) from None


def unpack(data: bytes) -> tuple[int, ...]:
    """Reads the wire form back. Raises HashError if the length is not a multiple of 8."""
    count, rest = divmod(len(data), 8)
    if rest:
        raise HashError(f"packed hashes must be a multiple of 8 bytes, got {len(data)} bytes", count, data[-rest:])
    return struct.unpack(f">{count}q", data)


def check(hashes: Sequence[object]) -> tuple[int, ...]:
    """Python's own form, checked: signed 64-bit ints and nothing else."""
    values = tuple(hashes)
    if not set(map(type, values)) <= {int}:
        raise _range_error(values)
    checked = cast("tuple[int, ...]", values)  # mypy does not follow the set of types
    pack(checked)
    return checked


def to_hex(value: int) -> str:
    """16 lower-case hex digits of the two's complement."""
    if not MIN <= value <= MAX:
        raise HashError("outside signed 64 bits", 0, value)
    return f"{value & (_WRAP - 1):016x}"


def to_legacy(value: int) -> str:
    """LMCache's text: sign, hex digits, no padding."""
    if not MIN <= value <= MAX:
        raise HashError("outside signed 64 bits", 0, value)
    return f"{value:x}"


def parse(text: object, position: int = 0) -> int:
    """Reads either text form. 16 digits without a sign are a two's complement pattern; fewer, or a sign, are legacy."""
    if not isinstance(text, str):
        raise HashError("expected hex text", position, text)
    if not _TEXT.match(text):
        raise HashError("expected 16 lower-case hex digits, or LMCache's form without padding", position, text)
    value = int(text, 16)
    if value < MIN:
        raise HashError("outside signed 64 bits", position, text)
    # A legacy positive never needs 16 digits with the top bit set, so this reading is unambiguous.
    return value - _WRAP if value > MAX else value


def parse_all(texts: Sequence[object], limit: int = MAX_PER_MESSAGE) -> tuple[int, ...]:
    """Reads a list of texts; the first bad one is named by position and value."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, (list, tuple)):
        raise HashError("expected a list of hex texts", 0, texts)
    if len(texts) > limit:
        raise HashError(f"{len(texts)} hashes, at most {limit} are allowed in one message", limit, texts[limit])
    return tuple([parse(text, position) for position, text in enumerate(texts)])
