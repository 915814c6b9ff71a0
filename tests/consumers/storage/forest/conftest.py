# SPDX-License-Identifier: Apache-2.0
"""A forest on a clock that tests move."""

from __future__ import annotations

import pytest

from semkv.consumers.storage.forest import PrefixForest


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The forest's time."""
    return Clock()


@pytest.fixture
def forest(clock: Clock) -> PrefixForest:
    """An empty forest of the tenant `default`."""
    return PrefixForest("default", clock=clock)
