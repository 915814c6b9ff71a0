# SPDX-License-Identifier: Apache-2.0
"""How full a tier is, in words: in one unit, with digits that say something."""

import pytest

from semkv.cli.output import filled


@pytest.mark.parametrize(
    ("used", "room", "said"),
    [
        (0, 0, "0 B"), (5, 100, "5 of 100 B"), (20 << 10, 48 << 10, "20 of 48 KiB"),
        (1 << 20, 1 << 30, "1 of 1024 MiB"),
        (107_374_182, 107_374_182, "102 of 102 MiB"), (3 << 29, 20 << 30, "1.5 of 20 GiB"), (5 << 50, 0, "5120 TiB"),
        (3_000_000, 100_000, "2930 of 97.7 KiB"),
    ],
)  # fmt: skip
def test_in_the_unit_of_the_larger(used: int, room: int, said: str) -> None:
    assert filled(used, room) == said
