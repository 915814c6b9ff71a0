# SPDX-License-Identifier: Apache-2.0
"""The patch mechanism: known functions only, all or nothing, idempotent, and back again."""

from __future__ import annotations

import functools
import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from semkv.engine_hooks.patches import (
    PATCHES,
    Patch,
    PatchState,
    Replacement,
    active_patches,
    apply,
    apply_all,
    restore_all,
    source_digest,
)
from tests.support.lmcache_engine import lmcache_engine

HERE = "tests.engine_hooks.patches.test_mechanism:"


class Subject:
    """What is patched here."""

    def known(self) -> str:
        return "original"

    def other(self, value: int = 1) -> int:
        return value


def replace_with(text: str) -> Callable[[Any], Any]:
    return lambda _current: lambda self: text


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    restore_all()
    yield
    restore_all()
    apply_all()


def digest(name: str) -> frozenset[str]:
    return frozenset({source_digest(vars(Subject)[name])})


def test_a_known_function_is_replaced_once_and_put_back() -> None:
    patch = Patch("p", "why", (Replacement(HERE + "Subject.known", replace_with("new"), digest("known")),))
    assert apply([patch])[0].state is PatchState.APPLIED
    assert Subject().known() == "new"
    assert apply([patch])[0].state is PatchState.ALREADY
    assert active_patches() == {"p"}
    restore_all()
    assert Subject().known() == "original"


def test_an_unknown_function_is_left_alone_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    patch = Patch(
        "p",
        "why",
        (
            Replacement(HERE + "Subject.other", replace_with("x"), digest("other")),
            Replacement(HERE + "Subject.known", replace_with("new"), frozenset({"0" * 16})),
        ),
    )
    with caplog.at_level(logging.WARNING):
        report = apply([patch])[0]
    assert report.state is PatchState.UNKNOWN_FUNCTION
    assert (Subject().known(), Subject().other()) == ("original", 1), "all or nothing"
    assert len(caplog.records) == 1
    assert "Subject.known" in caplog.text


def test_missing_functions_modules_and_needed_patches_are_named() -> None:
    missing = [
        Patch("a", "", (Replacement(HERE + "Subject.gone", replace_with("x"), frozenset()),)),
        Patch("b", "", (Replacement("no.such.module:thing", replace_with("x"), frozenset()),)),
        Patch("c", "", (), requires=("a",)),
    ]
    assert [report.state for report in apply(missing)] == [
        PatchState.MISSING,
        PatchState.MISSING,
        PatchState.NEEDS_ANOTHER,
    ]


def test_wrappers_check_parameters_and_stack_on_replacements() -> None:
    def louder(current: Any) -> Any:
        @functools.wraps(current)
        def known(self: Any) -> str:
            return str(current(self)).upper()

        return known

    first = Patch("first", "", (Replacement(HERE + "Subject.known", replace_with("new"), digest("known")),))
    second = Patch("second", "", (Replacement(HERE + "Subject.known", louder, digest("known")),))
    third = Patch("third", "", (Replacement(HERE + "Subject.other", louder, parameters=("nothing",)),))
    states = [report.state for report in apply([first, second, third])]
    assert states == [PatchState.APPLIED, PatchState.APPLIED, PatchState.UNKNOWN_FUNCTION]
    assert Subject().known() == "NEW"


def test_all_patches_know_this_lmcache_and_say_why_they_are_there() -> None:
    assert all(report.active for report in apply_all())
    assert all(report.state is PatchState.ALREADY for report in apply_all())
    assert all(patch.reason for patch in PATCHES)


def test_the_pool_begins_on_a_page(tmp_path: Path) -> None:
    apply_all()
    with lmcache_engine(tmp_path) as rig:
        assert rig.cpu.memory_allocator.buffer.data_ptr() % mmap.PAGESIZE == 0
