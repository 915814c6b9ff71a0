# SPDX-License-Identifier: Apache-2.0
"""The emulated ACL runtime, built once for all that run the real torch_npu on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.acl_emulator import UnavailableError, build, torch_npu_folder


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        torch_npu_folder()
        return build(tmp_path_factory.mktemp("acl"))
    except UnavailableError as missing:
        pytest.skip(str(missing))
