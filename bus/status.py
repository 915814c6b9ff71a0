# SPDX-License-Identifier: Apache-2.0
"""The words of the contract: states, chunk statuses, orders, tiers, roles and operations.

Every enum is a `str`, so members compare equal to their text and go on the wire as it. A reader keeps a word it does
not know as plain text (`open_word`), so that an older reader survives a newer writer.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar


class Word(str, Enum):
    """A text enum that prints as its text on every supported Python."""

    def __str__(self) -> str:
        return str(self.value)


class State(Word):
    """How a command ended on one rank."""

    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ChunkStatus(Word):
    """What happened to one requested chunk on one rank."""

    LOADED = "loaded"
    ALREADY_THERE = "already_there"
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    NO_MEMORY = "no_memory"
    FAILED = "failed"
    NOT_TRIED = "not_tried"
    REMOVED = "removed"
    ABSENT = "absent"
    IN_USE = "in_use"
    SHARED = "shared"
    UNSUPPORTED = "unsupported"


class HashesStatus(Word):
    """Whether a finished event's hashes can be relied on."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    UNSTABLE = "unstable"
    UNSUPPORTED = "unsupported"


class Order(Word):
    """Whether a command's hashes are one prefix chain in order, or just a set."""

    PREFIX = "prefix"
    SET = "set"


class Tier(Word):
    """Where a chunk can be."""

    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"
    DEVICE = "device"


class Role(Word):
    """What a rank is: only storage ranks answer commands."""

    SCHEDULER = "scheduler"
    STORAGE = "storage"
    PASSIVE = "passive"


class Op(Word):
    """What a command asks for; the last token of its subject."""

    PREFETCH = "prefetch"
    EVICT = "evict"
    RETAIN = "retain"
    RELEASE = "release"
    LOCATE = "locate"
    CANCEL = "cancel"


W = TypeVar("W", bound=Word)

_WORD_LIMIT = 64


def open_word(kind: type[W], value: object) -> W | str:
    """The member for a known text, the text itself for an unknown one; anything but short text is refused."""
    if not isinstance(value, str):
        raise ValueError(f"expected one of {', '.join(kind)}, got {value!r:.60}")
    try:
        return kind(value)
    except ValueError:
        pass
    if not 0 < len(value) <= _WORD_LIMIT or not value.isascii() or not value.isprintable():
        raise ValueError(f"expected a word of 1 to {_WORD_LIMIT} printable ASCII characters, got {value!r:.60}")
    return value
