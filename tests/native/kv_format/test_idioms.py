# SPDX-License-Identifier: Apache-2.0
"""Our own code asks the layout library, and the rule that says so can find who does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semkv.native.kv_format.idioms import check_folders, check_source

ROOT = Path(__file__).parents[3]
ROOMS = ("bus", "native", "consumers", "engine_hooks", "cli")


def test_no_room_interprets_a_layout_by_itself() -> None:
    assert [str(finding) for finding in check_folders(ROOT / room for room in ROOMS)] == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("n = kv_caches[0].shape[1]", "KV1"),
        ("n = self.kv_cache.stride(0)", "KV1"),
        ("k = kv_caches[3]", "KV2"),
        ("k = kvcaches[layer][0]", "KV2"),
        ("if fmt == EngineKVFormat.NL_X_NB_BS_HS: pass", "KV3"),
        ("if fmt in (EngineKVFormat.NL_X_NB_BS_HS, EngineKVFormat.NL_X_NB_BSV_BSS): pass", "KV3"),
        ("from semkv.native.kv_format.registry import get_spec", "KV4"),
        ("import semkv.native.kv_format.spec", "KV4"),
    ],
)
def test_a_forbidden_idiom_is_found(source: str, rule: str) -> None:
    assert rule in {finding.rule for finding in check_source(source, Path("x.py"))}


@pytest.mark.parametrize(
    "source",
    [
        "n = get_num_blocks(kv_caches, fmt)",
        "t = kv_caches['model.layers.0']",
        "n = chunk.shape[1]",
        "f = EngineKVFormat.NL_X_NB_BS_HS",
        "from semkv.native.layout import get_spec",
        "for tensor in kv_caches: pass",
    ],
)
def test_what_is_allowed_is_not(source: str) -> None:
    assert check_source(source, Path("x.py")) == []


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("n = kv_caches[0].shape\n", encoding="utf-8")
    program = [sys.executable, "-m", "semkv.native.kv_format.idioms"]
    done = subprocess.run([*program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bad.py:1: KV1" in done.stdout
    clean = subprocess.run([*program, str(ROOT / "native")], capture_output=True, check=False)
    assert clean.returncode == 0
