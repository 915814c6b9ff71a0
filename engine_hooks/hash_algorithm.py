# SPDX-License-Identifier: Apache-2.0
"""Which chunk-hash algorithm an LMCache configuration asks for: LMCache's own, or `blake3`, ours.

`extra_config: {semkv_hash_algorithm: blake3}` chooses ours; so does `pre_caching_hash_algorithm: blake3`, which LMCache
alone does not know. Pure functions.
"""

from __future__ import annotations

from typing import Any

BLAKE3 = "blake3"
OPTION = "semkv_hash_algorithm"


def chosen(config: Any) -> str:
    """`blake3`, or the name of LMCache's algorithm. ValueError for a value of the option that is not known."""
    extra = getattr(config, "extra_config", None) or {}
    asked = extra.get(OPTION)
    if asked is not None and asked != BLAKE3:
        raise ValueError(f"extra_config.{OPTION}={asked!r}: the only algorithm semkv adds is {BLAKE3!r}")
    if asked == BLAKE3:
        return BLAKE3
    return str(getattr(config, "pre_caching_hash_algorithm", None) or "builtin")
