# SPDX-License-Identifier: Apache-2.0
"""Every patch on LMCache's storage: the scenario holds with it and fails without it, on a real engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from semkv.engine_hooks.patches import PATCHES, apply_all, restore_all
from tests.engine_hooks.patches.scenarios import SCENARIOS
from tests.support.lmcache_engine import Rig, assert_lock_free, lmcache_engine

# Patches that stand on another; leaving the other out leaves them out, too.
STANDING_ON = {"disk_load": {"selective_unpin", "warm_hot_cache"}, "selective_unpin": {"warm_hot_cache"}}


@pytest.fixture(autouse=True)
def _own_patches() -> Iterator[None]:
    restore_all()
    yield
    restore_all()
    apply_all()


def let_go(rig: Rig) -> None:
    """End what an unpatched LMCache left hanging, so that the engine can be closed."""
    for lock in (rig.disk.disk_lock, rig.cpu.cpu_lock):
        while not lock.acquire(timeout=0.2):
            lock.release()
        lock.release()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_holds_with_the_patches(tmp_path: Path, scenario: Callable[[Rig], None]) -> None:
    assert all(report.active for report in apply_all())
    with lmcache_engine(tmp_path, **SCENARIOS[scenario].options) as rig:
        scenario(rig)
        assert_lock_free(rig.disk.disk_lock, "disk_lock")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_fails_without_its_patch(
    tmp_path: Path, scenario: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = SCENARIOS[scenario]
    names = set(fails.without.split())
    apply_all(leave_out=names.union(*(STANDING_ON.get(name, set()) for name in names)))
    monkeypatch.setattr("tests.engine_hooks.patches.scenarios.SECONDS", 1.0)
    monkeypatch.setattr("tests.support.lmcache_engine.LOCK_WAIT_S", 0.2)
    with lmcache_engine(tmp_path, **fails.options) as rig:
        try:
            with pytest.raises(fails.error, match=re.escape(fails.words) or None):
                scenario(rig)
        finally:
            let_go(rig)


def test_every_patch_has_a_scenario() -> None:
    covered = {name for fails in SCENARIOS.values() for name in fails.without.split()}
    assert covered == {patch.name for patch in PATCHES}
