# SPDX-License-Identifier: Apache-2.0
"""The demo's story on the real engine: what the memory map decides is what happens, and every claim holds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from semkv.cli.demo.run import STORE, run
from semkv.cli.demo.stack import attach
from semkv.cli.demo.texts import topic
from semkv.consumers.memory import Store
from tests.end_to_end.conftest import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


async def test_every_claim_of_the_demo_holds_on_an_engine_that_runs_already(world: World, tmp_path: Path) -> None:
    screen = io.StringIO()
    # Small enough for the engine's pool, of which a prefetch fills at most half.
    topics = (topic("billing", turns=2, sentences=6), topic("garden", turns=2, sentences=6))
    endpoints = attach(world.engine.url, world.plain.url, world.nats.url)
    claims = await run(Console(file=screen, width=200), endpoints, tmp_path / "trace.json", topics)
    assert not claims.broken, screen.getvalue()
    texts = [claim.text for claim in claims.made]
    assert sum(text.startswith("the map finds what") for text in texts) == 3
    assert sum("output is token for token" in text for text in texts) == 6
    assert "semkv why" in screen.getvalue()

    store = Store(tmp_path / STORE)
    decided = [(d.moment, d.action, d.outcome) for d in store.decisions.recent()]
    store.close()
    assert decided.count(("continued", "prefetch", "succeeded")) == 3
    assert {action for moment, action, _ in decided if moment == "session_ended"} == {"evict"}
