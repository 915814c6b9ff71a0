# SPDX-License-Identifier: Apache-2.0
"""Transfers through the real torch_npu, on an emulated ACL runtime: bytes, order and overlap, not speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.acl_emulator import run_program

PROGRAM = Path(__file__).with_name("npu_program.py")


FAST = ("pinned", "pageable", "kernels", "refused", "connector")
SLOW = ("ordering", "pageable", "on_device_objects")


@pytest.fixture(scope="module")
def at_full_speed(libraries: Path) -> str:
    """What one process said that did all of FAST: to import torch and torch_npu takes longer."""
    done = run_program(PROGRAM, libraries, list(FAST))
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def with_slow_copies(libraries: Path) -> str:
    done = run_program(PROGRAM, libraries, list(SLOW), EMULATED_ACL_GB_S="0.01")
    return done.stdout + done.stderr


@pytest.mark.parametrize("what", FAST)
def test_on_the_emulated_device(what: str, at_full_speed: str) -> None:
    assert f"PASSED {what}." in at_full_speed, at_full_speed


@pytest.mark.parametrize("what", SLOW)
def test_order_holds_when_copies_are_slow(what: str, with_slow_copies: str) -> None:
    assert f"PASSED {what}." in with_slow_copies, with_slow_copies


def test_loads_and_stores_overlap(libraries: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    done = run_program(PROGRAM, libraries, ["overlap"], EMULATED_ACL_GB_S="0.002", EMULATED_ACL_TRACE=str(trace))
    assert "PASSED" in done.stdout, done.stdout + done.stderr
    copies = read(trace)
    loads = [(int(start), int(end)) for _, kind, _, start, end in copies if kind == "1"]
    stores = [(int(start), int(end)) for _, kind, _, start, end in copies if kind == "2"]
    assert len(loads) >= 16
    assert len(stores) >= 16
    streams = {kind: {stream for stream, k, *_ in copies if k == kind} for kind in ("1", "2")}
    assert streams["2"] and streams["1"] - streams["2"]  # each direction has a stream of its own
    assert any(a < d and c < b for a, b in loads for c, d in stores)


def read(trace: Path) -> list[list[str]]:
    return [line.split() for line in trace.read_text(encoding="utf-8").splitlines()]
