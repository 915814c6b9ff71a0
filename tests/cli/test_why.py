# SPDX-License-Identifier: Apache-2.0
"""`semkv why` on a memory map's real file."""

import json

import pytest

from semkv.consumers.memory import Store


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "memory.db"
    opened = Store(path)
    decision = opened.decisions.record(
        command_id="cmd-1", agent="me", session="billing", moment="tool_call_started", moment_id="", action="prefetch",
        reason="the tool usually takes 4 s, loading 1 s", chunks=12, details={"request_id": "r-1", "topic": "bug"},
    )  # fmt: skip
    opened.decisions.finish(decision.id, "succeeded", {"ranks": []})
    opened.decisions.record(
        command_id=None, agent="me", session="garden", moment="turn_started", moment_id="", action="nothing",
        reason="no chain is known",
    )  # fmt: skip
    opened.close()
    return path


def test_a_command_is_explained(semkv, store):
    told = semkv("why", "cmd-1", "--store", store).stdout
    assert "prefetch cmd-1" in told and "the tool usually takes 4 s" in told and "succeeded" in told


def test_without_a_command_the_newest_decisions_are_listed(semkv, store):
    told = semkv("why", SEMKV_MEMORY_STORE=str(store)).stdout
    assert told.index("garden") < told.index("billing")
    rows = [
        json.loads(line)
        for line in semkv("why", "--json", "--store", store, "--session", "billing").stdout.splitlines()
    ]
    assert [(row["action"], row["chunks"], row["details"]["topic"]) for row in rows] == [("prefetch", 12, "bug")]


def test_an_unknown_command_is_bad_input(semkv, store):
    assert "knows no command" in semkv("why", "cmd-9", "--store", store, code=2).stderr


def test_a_missing_store_is_not_made(semkv, tmp_path):
    assert "is no file" in semkv("why", "cmd-1", "--store", "absent.db", code=2).stderr
    assert not (tmp_path / "absent.db").exists()


def test_a_file_that_is_no_store_is_refused(semkv, tmp_path):
    (tmp_path / "text.db").write_text("not a database, " * 100)
    assert "text.db" in semkv("why", "--store", "text.db", code=2).stderr
