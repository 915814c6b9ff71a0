# SPDX-License-Identifier: Apache-2.0
"""The hashes of a finished event, read back from LMCache's texts: with the C++ core and without it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.bus.hashes import MAX, MIN
from semkv.bus.messages.finished import Finished
from semkv.bus.status import HashesStatus
from semkv.engine_hooks import finished
from semkv.engine_hooks.finished import FinishedNote
from semkv.native import _core

EDGES = [0, 1, -1, 15, 16, MAX, MIN, MAX - 1, MIN + 1, 1 << 62, -(1 << 62)]


@pytest.fixture(params=["core", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(finished, "_read_plain", lambda texts: None)
    else:
        assert finished._read_plain is _core.hash_ints
    return str(request.param)


def _messages(texts: list[str], per_part: int = 32768) -> list[Finished]:
    note = FinishedNote()
    note.status, note.texts, note.engine_request_id = HashesStatus.KNOWN, texts, "cmpl-1-0-0123abcd"
    told = {"domain": "d" * 12, "instance": "i", "epoch": 1, "chunk_size": 16, "suffixed": True}
    return list(finished.messages(note, **told, per_part=per_part))  # type: ignore[arg-type]  # by name


@pytest.mark.usefixtures("reader")
def test_every_hash_is_read_back() -> None:
    assert [m.chunk_hashes for m in _messages([f"{value:x}" for value in EDGES])] == [tuple(EDGES)]
    assert [m.chunk_hashes for m in _messages([])] == [()]
    parts = _messages([f"{value:x}" for value in EDGES], per_part=4)
    assert [len(m.chunk_hashes) for m in parts] == [4, 4, 3] and {m.parts for m in parts} == {3}
    assert sum((m.chunk_hashes for m in parts), ()) == tuple(EDGES)


@pytest.mark.usefixtures("reader")
def test_a_text_that_is_no_hash_makes_no_event() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        _messages(["1", "not a hash"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(MIN, MAX), max_size=100))
def test_the_core_reads_what_lmcache_prints(values: list[int]) -> None:
    texts = [f"{value:x}" for value in values]
    assert _core.hash_ints(texts) == tuple(values) == _core.hash_ints(tuple(texts))


OTHER = [
    "",
    "-",
    "--1",
    "+1",
    "0x1",
    "A",
    "1_0",
    " 1",
    "1 ",
    "g",
    "é",
    "８",
    "8" + "0" * 15,
    "-8" + "0" * 14 + "1",
    "f" * 17,
]


@pytest.mark.parametrize("text", OTHER)
def test_the_core_leaves_any_other_text_alone(text: str) -> None:
    assert _core.hash_ints([text]) is None and _core.hash_ints(["1", text, "2"]) is None


def test_the_core_leaves_anything_but_lists_of_texts_alone() -> None:
    assert [_core.hash_ints(other) for other in ([1], [b"1"], [None], "12", {"1"}, iter(["1"]), None)] == [None] * 7


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789abcdefABCDEFx-+_ ", max_size=18))
def test_the_core_never_reads_a_text_as_another_number(text: str) -> None:
    found = _core.hash_ints([text])
    assert found is None or found == (int(text, 16),)
