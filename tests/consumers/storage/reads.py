# SPDX-License-Identifier: Apache-2.0
"""Steps in before or after the reads of chunks' files, in whichever thread reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semkv.consumers.storage import files


def _nothing(path: str) -> None:
    pass


def around_reads(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str], object] = _nothing,
    after: Callable[[str], object] = _nothing,
) -> None:
    """Call `before` and `after` each read with the file's path."""
    real = files.read_full

    def read_full(path: str, buffer: memoryview, *, direct: bool = False, skip: int = 0) -> int:
        before(path)
        done = real(path, buffer, direct=direct, skip=skip)
        after(path)
        return done

    monkeypatch.setattr(files, "read_full", read_full)
