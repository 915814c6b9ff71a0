# SPDX-License-Identifier: Apache-2.0
"""The quick starts' Python runs on a real server, with a rank on a stand-in storage, and all links lead somewhere."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from semkv.bus.embedded import EmbeddedServer
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import gateway, rank_of, settings
from tests.consumers.rank.stand_in import StandInStorage

__all__ = ["gateway", "rank_of", "settings"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("quickstart-*.md"))
EVERY = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NATS = "nats://127.0.0.1:4222"


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)


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
    for page in EVERY:
        for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
