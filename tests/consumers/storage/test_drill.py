# SPDX-License-Identifier: Apache-2.0
"""The concurrency drill, in short form."""

from __future__ import annotations

import pytest

from bench.drill import run


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
def test_everything_at_once_leaves_the_invariants_true(faults: bool) -> None:
    counts = run(3.0, seed=7, faults=faults, rounds=3)
    assert counts["quiet points"] == 3
    assert counts["requests"] > 0
    assert counts["prefetches"] > 0
    assert counts["evicts"] > 0
