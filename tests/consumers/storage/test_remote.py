# SPDX-License-Identifier: Apache-2.0
"""The remote tier with LMCache's own fs connector: prefetch from it, locate in it, evict from it by name and force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, State, Tier
from semkv.consumers.storage.lmcache import LMCacheStorage
from tests.consumers.storage.nobody import Nobody
from tests.support.lmcache_engine import Rig, checksum, lmcache_engine


@pytest.fixture(params=[True, False], ids=["with-header", "bare"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rig, LMCacheStorage, Path]]:
    """An engine without a local disk, whose chunks go to files of the fs connector."""
    store = tmp_path / "store"
    with lmcache_engine(
        tmp_path, disk=False, settings={"remote_url": f"fs://host:0/{store}/"}, extra={"save_chunk_meta": request.param}
    ) as rig:
        yield rig, LMCacheStorage(rig.engine, Nobody()), store


def files_of(store: Path) -> list[Path]:
    return sorted(store.rglob("*.data"))


def written(rig: Rig, store: Path, count: int) -> None:
    """Wait for the files, and for the writes to let go of their objects."""
    rig.wait_for(lambda: len(files_of(store)) == count, "the files of the remote store")
    rig.wait_for(lambda: all(refs == 1 for refs, _, _ in rig.counts()["hot"].values()), "the writes to let go")


def test_from_the_store_to_ddr_and_out_of_both(remote: tuple[Rig, LMCacheStorage, Path]) -> None:
    rig, storage, store = remote
    tokens = rig.tokens(3)
    hashes = rig.store(tokens)
    written(rig, store, 3)
    before = {key.chunk_hash: checksum(obj) for key, obj in rig.cpu.hot_cache.items()}
    assert storage.locate(hashes).chunk_tiers == ((Tier.CPU, Tier.REMOTE),) * 3
    assert storage.evict(hashes).chunk_status == (ChunkStatus.REMOVED,) * 3
    assert len(files_of(store)) == 3, "the remote tier is only touched by name"
    assert storage.prefetch(hashes, dry_run=True).bytes_by_tier == {"remote": 3 * rig.chunk_bytes}
    result = storage.prefetch(hashes)
    assert result.chunk_status == (ChunkStatus.LOADED,) * 3
    assert result.bytes_by_tier == {"remote": 3 * rig.chunk_bytes}
    assert {key.chunk_hash: checksum(obj) for key, obj in rig.cpu.hot_cache.items()} == before
    rig.check()
    assert storage.evict(hashes, tiers=(Tier.REMOTE,)).state is State.REJECTED
    forced = storage.evict(hashes, tiers=(Tier.REMOTE,), force=True)
    assert forced.chunk_status == (ChunkStatus.REMOVED,) * 3
    assert files_of(store) == []
    assert storage.evict(hashes, tiers=(Tier.REMOTE,), force=True).chunk_status == (ChunkStatus.ABSENT,) * 3
    rig.check()


def test_a_short_file_fails_and_is_not_registered(remote: tuple[Rig, LMCacheStorage, Path]) -> None:
    rig, storage, store = remote
    tokens = rig.tokens(1)
    hashes = rig.store(tokens)
    written(rig, store, 1)
    storage.evict(hashes)
    path = files_of(store)[0]
    os.truncate(path, path.stat().st_size - 100)
    assert storage.prefetch(hashes).chunk_status == (ChunkStatus.FAILED,)
    assert rig.counts()["hot"] == {}
    rig.check()


def test_a_connector_that_cannot_remove_says_so_while_the_others_are_done(
    remote: tuple[Rig, LMCacheStorage, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, storage, store = remote
    hashes = rig.store(rig.tokens(1))
    written(rig, store, 1)
    from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

    monkeypatch.delattr(FSConnector, "remove_sync")
    result = storage.evict(hashes, tiers=(Tier.CPU, Tier.REMOTE), force=True)
    assert result.chunk_status == (ChunkStatus.UNSUPPORTED,)
    assert result.reason is not None and "FSConnector" in result.reason
    assert rig.counts()["hot"] == {}
