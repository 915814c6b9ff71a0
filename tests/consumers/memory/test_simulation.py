# SPDX-License-Identifier: Apache-2.0
"""The simulation of lead times: it accounts for every chunk, and can tell a good lead from a bad one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semkv.consumers.memory.simulation import Model, simulate, sweep, table


def test_every_prefetched_chunk_is_useful_late_or_wasted(capsys: pytest.CaptureFixture[str]) -> None:
    runs = sweep()
    with capsys.disabled():
        print("\n" + table(runs))
    for run in runs:
        assert run.useful + run.late + run.wasted == run.prefetched, run
        assert run.requests == Model().sessions * Model().turns
    none, oracle, *leads = runs
    assert none.prefetched == 0 and none.waited_ms > 0
    assert oracle.waited_ms < min(run.waited_ms for run in leads)
    assert min(run.waited_ms for run in leads) < none.waited_ms
    # Early is wasted, late is late.
    assert leads[-2].share("wasted") > leads[0].share("wasted") and leads[0].share("late") > leads[-2].share("late")
    assert "SIMULATION" in table(runs)


def test_it_is_deterministic_and_perfect_guesses_come_near_the_oracle() -> None:
    model = Model(guess_spread=0.0)
    first, again = simulate(model, "a", 250.0), simulate(model, "b", 250.0)
    assert replace(first, name="") == replace(again, name="")
    none, oracle = simulate(model, "n", None), simulate(model, "o", None, oracle=True)
    gain = (none.waited_ms - first.waited_ms) / (none.waited_ms - oracle.waited_ms)
    assert gain > 0.6


def test_with_room_for_all_nothing_is_worth_prefetching() -> None:
    model = Model(fast_chunks=10**9)
    run = simulate(model, "a", 1000.0)
    assert run.wasted == 0
    assert run.waited_ms == pytest.approx(simulate(model, "n", None).waited_ms, rel=0.2)
