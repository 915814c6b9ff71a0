# SPDX-License-Identifier: Apache-2.0
"""Chunk hashes: three forms, one value, and nothing else accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.bus import hashes

INT64 = st.integers(min_value=hashes.MIN, max_value=hashes.MAX)


@given(st.lists(INT64, max_size=200))
def test_every_form_reads_back(values: list[int]) -> None:
    assert hashes.unpack(hashes.pack(values)) == tuple(values)
    assert hashes.parse_all([hashes.to_hex(v) for v in values]) == tuple(values)
    assert hashes.parse_all([hashes.to_legacy(v) for v in values]) == tuple(values)


def test_known_forms() -> None:
    assert hashes.pack([-1, 255]) == b"\xff" * 8 + b"\x00" * 7 + b"\xff"
    assert hashes.to_hex(-1) == "f" * 16
    assert hashes.to_hex(255) == "00000000000000ff"
    assert hashes.to_legacy(-255) == "-ff"
    assert hashes.parse("-8000000000000000") == hashes.MIN
    assert hashes.parse("7fffffffffffffff") == hashes.MAX
    assert hashes.parse("8000000000000000") == hashes.MIN


@pytest.mark.parametrize(
    "bad",
    ["", " ff", "ff ", "0xff", "f_f", "FF", "+ff", "-", "--f", "g", "ff\n", "0" * 15, "00ff", "-0", "-00000000000000ff",
     "f" * 17, "-8000000000000001", "-ffffffffffffffff", "٣", None, 5, 5.0, True, b"ff", ["ff"]],
)  # fmt: skip
def test_what_is_no_hash_is_refused_with_its_position_and_value(bad: object) -> None:
    with pytest.raises(hashes.HashError) as error:
        hashes.parse_all(["1", "2", bad])
    assert error.value.position == 2
    assert error.value.value == bad
    assert "position 2" in str(error.value)


@given(st.text(max_size=20))
def test_any_text_is_either_read_exactly_or_refused(text: str) -> None:
    try:
        value = hashes.parse(text)
    except hashes.HashError:
        return
    assert text in (hashes.to_hex(value), hashes.to_legacy(value))


@pytest.mark.parametrize("bad", [hashes.MAX + 1, hashes.MIN - 1, 1.0, "1", None, True])
def test_packing_names_the_first_bad_value(bad: object) -> None:
    with pytest.raises(hashes.HashError) as error:
        hashes.check([1, bad])
    assert error.value.position == 1


def test_limits() -> None:
    with pytest.raises(hashes.HashError, match="3 hashes, at most 2"):
        hashes.parse_all(["1", "2", "3"], limit=2)
    with pytest.raises(hashes.HashError, match="multiple of 8"):
        hashes.unpack(b"123456789")
    with pytest.raises(hashes.HashError, match="expected a list"):
        hashes.parse_all("ff")
