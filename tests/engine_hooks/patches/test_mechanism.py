# SPDX-License-Identifier: Apache-2.0
"""The patch mechanism: known functions only, all or nothing, idempotent, and back again."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
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
    vllm_stop_string,
    vllm_streaming,
)

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


EVERY_FUNCTION = [
    pytest.param(patch, replacement, id=f"{patch.name}-{replacement.target.rpartition('.')[2]}")
    for patch in (*PATCHES, vllm_stop_string.PATCH, vllm_streaming.CHAT, vllm_streaming.TEXT)
    for replacement in patch.replacements
]


@pytest.mark.parametrize(("patch", "replacement"), EVERY_FUNCTION)
def test_each_patch_leaves_a_function_it_does_not_know_alone(
    patch: Patch, replacement: Replacement, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, _, path = replacement.target.partition(":")
    pytest.importorskip(module.partition(".")[0])
    owner = functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(module))
    name = path.rpartition(".")[2]
    needed = [other for other in PATCHES if other.name in patch.requires]
    assert all(report.active for report in apply([*needed_by(needed), *needed]))

    def stranger() -> str:
        return "as it was"

    with monkeypatch.context() as changed, caplog.at_level(logging.WARNING, "semkv.engine_hooks.patches"):
        changed.setattr(owner, name, stranger)
        others = {r.target: place(r.target) for r in patch.replacements}
        report = apply([patch])[0]
        assert report.state is PatchState.UNKNOWN_FUNCTION
        assert replacement.target in report.detail
        assert {r.target: place(r.target) for r in patch.replacements} == others, "all or nothing"
        assert [record.message for record in caplog.records] == [f"patch {patch.name} is left out: {report.detail}"]


def needed_by(patches: list[Patch]) -> list[Patch]:
    """What these patches stand on themselves."""
    names = {name for patch in patches for name in patch.requires}
    return [patch for patch in PATCHES if patch.name in names]


def place(target: str) -> Any:
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_each_patch_goes_in_once(patch: Patch) -> None:
    apply_all()
    before = [place(replacement.target) for replacement in patch.replacements]
    assert apply([patch])[0].state is PatchState.ALREADY
    assert [place(replacement.target) for replacement in patch.replacements] == before
