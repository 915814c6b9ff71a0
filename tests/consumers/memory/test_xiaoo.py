# SPDX-License-Identifier: Apache-2.0
"""xiaoO's settings and debug files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from semkv.consumers.memory.xiaoo import DebugFiles, XiaoOError, XiaoOSettings


def test_its_toml_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[llm]\nmodel = "x"\nkvcache_enabled = true\nkvcache_debug_enabled = true\n[ui]\ntheme = "d"\n')
    assert XiaoOSettings.load(file) == XiaoOSettings(True, True)
    assert XiaoOSettings.parse("") == XiaoOSettings(False, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[llm]\nkvcache_enabled = 'yes'", r"\[llm\] kvcache_enabled: 'yes' must be true or false"),
        ("[llm]\nkvcache_debug_enabled = 1", r"kvcache_debug_enabled: 1 must be true or false"),
        ("llm = 3", r"llm: 3 must be a table"),
        ("[llm", r"no TOML"),
    ],
)
def test_bad_toml_is_named(text: str, message: str) -> None:
    with pytest.raises(XiaoOError, match=message):
        XiaoOSettings.parse(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(XiaoOError, match=r"none\.toml"):
        XiaoOSettings.load(tmp_path / "none.toml")


MESSAGES = [
    {"role": "system", "content": "You help. Authorization: Bearer abcdefgh12345678 and 密码是hunter22。"},
    {"role": "user", "content": "my key is sk-proj-abcdefghijklmnop, db at postgres://me:hush@db/x", "api_key": "k"},
    {"role": "tool", "content": [{"text": "password=swordfish ok", "token": "tok-1"}], "name": "tokenizer"},
]


def test_nothing_is_written_unless_asked_for_or_without_hashes(tmp_path: Path) -> None:
    assert DebugFiles(tmp_path / "d").write("s", 1, messages=MESSAGES, chunk_hashes=["1f"]) is None
    assert DebugFiles(tmp_path / "d", enabled=True).write("s", 1, messages=MESSAGES, chunk_hashes=[]) is None
    assert not (tmp_path / "d").exists()


def test_the_same_file_as_there_without_secrets(tmp_path: Path) -> None:
    files = DebugFiles(tmp_path / "kvcache_debug", enabled=True)
    path = files.write("s1", 3, messages=MESSAGES, chunk_hashes=["-1f"], timing={"ttft_ms": 12.5, "other": 1})
    assert path is not None and path.name == "kvcache_debug_s1_3.json"
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    assert list(record) == ["session_id", "turn", "messages", "chunk_hashes", "timing"]
    assert record["timing"] == {"ttft_ms": 12.5, "total_time_ms": None, "tpot_ms": None}
    for secret in ("abcdefgh12345678", "hunter22", "sk-proj", "hush", "swordfish", "tok-1", '"k"'):
        assert secret not in text, secret
    assert "You help." in text and "tokenizer" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_old_files_go_and_a_session_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    files = DebugFiles(tmp_path / "d", enabled=True, keep=3)
    for turn in range(6):
        path = files.write("../../etc/x", turn, messages=[], chunk_hashes=["1"])
        assert path is not None and path.parent == tmp_path / "d"
        os.utime(path, ns=(turn + 1, turn + 1))
    left = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert len(left) == 3 and left[-1].endswith("_5.json")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_full_or_forbidden_disk_never_reaches_the_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "d").write_text("a file where the folder should be")
    files = DebugFiles(tmp_path / "d", enabled=True)
    assert files.write("s", 1, messages=[], chunk_hashes=["1"]) is None
    assert files.write("s", 2, messages=[], chunk_hashes=["1"]) is None
    assert len(caplog.records) == 1
