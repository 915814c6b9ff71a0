# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the storage tests: a patched process, a small real engine, and storage on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.engine_hooks.patches import apply_all, restore_all
from tests.consumers.storage.nobody import Nobody
from tests.support.lmcache_engine import Rig, lmcache_engine


@pytest.fixture(autouse=True, scope="session")
def _patched() -> Iterator[None]:
    reports = apply_all()
    assert all(report.active for report in reports), reports
    yield
    restore_all()


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A real engine: 16 chunks of DDR, 64 of disk; parametrize `rig` indirectly to change it."""
    with lmcache_engine(tmp_path, **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
def storage(rig: Rig) -> LMCacheStorage:
    """Storage operations on the engine, where nobody else's conversations live."""
    return LMCacheStorage(rig.engine, Nobody())
