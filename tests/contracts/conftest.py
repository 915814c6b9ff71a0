# SPDX-License-Identifier: Apache-2.0
"""`node`: skips, saying why, where Node or its packages cannot be had."""

from __future__ import annotations

import pytest

from tests.contracts import node as second_language


@pytest.fixture(scope="session")
def node() -> None:
    """Node and its packages are there."""
    reason = second_language.missing()
    if reason:
        pytest.skip(reason)
