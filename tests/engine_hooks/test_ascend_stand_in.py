# SPDX-License-Identifier: Apache-2.0
"""The named connector on a host with LMCache-Ascend, by a stand-in for its packages' public surface.

LMCache-Ascend cannot be installed without an NPU's toolchain. The stand-in is a package `lmcache_ascend` that has the
module and the class that operators name, and that replaces LMCache's lookup client when it is imported, as it does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

PACKAGE = """
import lmcache.v1.lookup_client.lmcache_async_lookup_client as client

class AscendStandInClient(client.LMCacheAsyncLookupClient):
    def get_cached_hashes(self, lookup_id):
        return None

client.LMCacheAsyncLookupClient = AscendStandInClient
"""
CONNECTOR = """
import lmcache_ascend
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic

class LMCacheAscendConnectorV1Dynamic(LMCacheConnectorV1Dynamic):
    pass
"""
CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
from semkv.engine_hooks.connector import SemKVConnectorV1
from semkv.engine_hooks import attach, lookup_client
from semkv.engine_hooks.lookup_client import HashRecordingLookupClient
print(SemKVConnectorV1.__mro__[2].__name__, attach.is_lmcache(SemKVConnectorV1))
print(HashRecordingLookupClient.__mro__[1].__name__)
"""


def test_the_named_connector_extends_lmcache_ascends(tmp_path: Path) -> None:
    package = tmp_path / "lmcache_ascend" / "integration" / "vllm"
    package.mkdir(parents=True)
    (tmp_path / "lmcache_ascend" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "lmcache_ascend" / "integration" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "lmcache_ascend_connector_v1.py").write_text(CONNECTOR)
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("LMCacheAscend", "AscendStandIn"))]
    assert lines == ["LMCacheAscendConnectorV1Dynamic True", "AscendStandInClient"]
