# SPDX-License-Identifier: Apache-2.0
"""`semkv demo`."""

from __future__ import annotations


def demo() -> None:
    """x."""
