# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages for operators and agents show are run as they stand, and their dashboard is true.

Blocks marked `sh` and `python` run against a real server and a rank on a stand-in storage. Commands that serve until
Ctrl-C are parsed, not run: the container test and their own tests run them.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from semkv.bus.embedded import EmbeddedServer
from semkv.cli.app import app
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import gateway, rank_of, settings
from tests.consumers.rank.stand_in import StandInStorage

__all__ = ["gateway", "rank_of", "settings"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("quickstart-*.md"), ROOT / "docs/operations.md", ROOT / "docs/security.md"])
SERVES = {"engine", "gateway", "demo", "watch"}
NATS = "nats://127.0.0.1:4222"


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_commands_run(
    page: Path,
    nats_server: EmbeddedServer,
    rank_of: Callable[..., RankWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_of(StandInStorage(disk={1, 2, 3}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    assert lines
    for line in lines:
        program, name, *arguments = shlex.split(line.replace(NATS, nats_server.url), comments=True)
        assert program == "semkv", line
        if name in SERVES:
            group = typer.main.get_command(app)
            assert isinstance(group, click.Group) or hasattr(group, "commands")
            group.commands[name].make_context(name, list(arguments))  # type: ignore[attr-defined]
            continue
        done = CliRunner().invoke(app, [name, *arguments])
        assert done.exit_code == 0, f"{line}\n{done.output}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_runs(
    page: Path,
    nats_server: EmbeddedServer,
    rank_of: Callable[..., RankWorker],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rank_of(StandInStorage(disk={1, 2, 3}))
    for block in blocks(page, "python"):
        scope: dict[str, object] = {}
        body = textwrap.indent(block.replace(NATS, nats_server.url), "    ")
        exec(f"async def example():\n{body}", scope)
        asyncio.run(scope["example"]())  # type: ignore[operator,arg-type]
    assert "succeeded" in capsys.readouterr().out


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
