# SPDX-License-Identifier: Apache-2.0
"""A prompt's chunk chain, and what may be forgotten when a session moves on.

Pure functions over tuples of signed 64-bit hashes. A hash is a *prefix chain*: an equal hash means an equal prefix, so
what two chains share is always a common prefix, and comparing from the front is exact. No I/O, no threads, no errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Chain", "common_prefix", "diff_deleted", "extends"]


@dataclass(frozen=True)
class Chain:
    """One prompt's chunks in order, and where they came from."""

    session: str
    hashes: tuple[int, ...]
    tenant: str = "default"
    domain: str = ""
    instance: str = ""
    request_id: str = ""
    chunk_size: int = 0
    prompt_tokens: int = 0
    finished_at: int = 0
    epoch: int = 0
    seq: int = 0
    topic: str = ""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading chunks two chains share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def extends(longer: Sequence[int], shorter: Sequence[int]) -> bool:
    """Whether ``longer`` begins with all of ``shorter``."""
    return len(longer) >= len(shorter) and common_prefix(longer, shorter) == len(shorter)


def diff_deleted(old: Sequence[int], new: Sequence[int] | None, keep: Iterable[Sequence[int]] = ()) -> tuple[int, ...]:
    """The chunks of ``old`` that a turn dropped, in chain order; empty when that cannot be known.

    ``new`` is the write-back of the turn. None and an empty one mean "the engine did not say" (the feature off, a
    provider without it, a prompt shorter than a chunk, a stream that lost it): nothing may be evicted on that word.
    What any chain in ``keep`` still uses stays.
    """
    if not new or not old:
        return ()
    kept = common_prefix(old, new)
    for chain in keep:
        kept = max(kept, common_prefix(old, chain))
    remaining = set(new)
    return tuple(h for h in old[kept:] if h not in remaining)
