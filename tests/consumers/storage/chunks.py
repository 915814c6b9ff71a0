# SPDX-License-Identifier: Apache-2.0
"""Chunks of a test engine: left on disk only, and compared with their files."""

from __future__ import annotations

from pathlib import Path

from tests.support.lmcache_engine import Rig


def on_disk(rig: Rig, chunks: int, seed: int = 0) -> tuple[int, ...]:
    """Store a prompt and leave it on disk only."""
    tokens = rig.tokens(chunks, seed=seed)
    hashes = rig.store(tokens)
    rig.drop_from_ddr(tokens)
    return hashes


def bytes_agree(rig: Rig) -> None:
    """Every hot chunk that is on disk too has the file's bytes."""
    for key, obj in rig.cpu.hot_cache.items():
        meta = rig.disk.dict.get(key)
        if meta is not None:
            assert bytes(obj.byte_array) == Path(meta.path).read_bytes()
