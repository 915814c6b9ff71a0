# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser against a real gateway: live, clickable, nothing overflowing, light and dark.

Pictures go to SEMKV_UI_PICTURES where that is set, so that a person can look at them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import nats
import pytest

from semkv.bus import codec, connect, subjects
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished, Outcome
from semkv.consumers.gateway.settings import GatewaySettings, Token
from semkv.consumers.rank import RankWorker
from semkv.consumers.storage.ops import TierInfo
from tests.consumers.gateway.conftest import DOMAIN, Gateway, running
from tests.consumers.rank.stand_in import CHUNK_BYTES, StandInStorage
from tests.ui.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

SHARED = tuple(range(1, 7))
BILLING = (*SHARED, *range(100, 118))
SUPPORT = (*SHARED, *range(200, 209))
CONNECT = "document.querySelector('#login button').click()"
HOSTILE = "<img src=x onerror=document.title='hacked'>"
SPANS = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
            "scopeSpans": [{"spans": spans}],
        }
        for service, spans in (
            ("agent", [{"traceId": "ab" * 16, "spanId": "01" * 8, "name": "publish …cmd.prefetch",
                        "startTimeUnixNano": "1000000000", "endTimeUnixNano": "1009000000"}]),
            ("engine", [
                {"traceId": "ab" * 16, "spanId": "02" * 8, "parentSpanId": "01" * 8, "name": "queue",
                 "startTimeUnixNano": "1001000000", "endTimeUnixNano": "1002000000"},
                {"traceId": "ab" * 16, "spanId": "03" * 8, "parentSpanId": "01" * 8, "name": "kv.tier.load disk→cpu",
                 "startTimeUnixNano": "1002000000", "endTimeUnixNano": "1008000000"}]),
        )
    ]
}  # fmt: skip


def finished(session: str, hashes: tuple[int, ...], seq: int, hit: int) -> Finished:
    return Finished(
        tenant="default", domain=DOMAIN.fingerprint, instance="e0", epoch=1, seq=seq, request_id=f"r{seq}",
        engine_request_id=f"r{seq}", session=session, finish_reason="stop", hashes_status="known", chunk_hashes=hashes,
        chunk_size=64, prompt_tokens=64 * len(hashes), lmcache_hit_tokens=hit, generated_tokens=3, arrived_at=1,
        finished_at=2,
    )  # fmt: skip


async def publish(url: str, *events: Finished | Outcome) -> None:
    nc = await nats.connect(url)
    for event in events:
        payload, headers = codec.encode(event)
        await nc.publish(subjects.event("default", event.domain, event.instance, event.type), payload, headers=headers)
    await nc.flush()
    await nc.close()


class Tiered(StandInStorage):
    """With tiers of a size, so that filling and emptying shows."""

    def tiers(self) -> list[TierInfo]:
        with self.lock:
            return [
                TierInfo("cpu", 48 * CHUNK_BYTES, len(self.cpu) * CHUNK_BYTES, len(self.cpu)),
                TierInfo("disk", 96 * CHUNK_BYTES, len(self.disk) * CHUNK_BYTES, len(self.disk)),
            ]


@pytest.fixture
async def stand(
    settings: GatewaySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Browser, Gateway]]:
    """The page of a gateway; spans of the gateway and of ranks started in the test go to one file."""
    spans = tmp_path / "spans.json"
    monkeypatch.setenv("SEMKV_TRACE_FILE", str(spans))
    async with running(replace(settings, trace_file=spans)) as gateway, Browser(tmp_path / "profile") as page:
        await page.screen(1280, 900, "light")
        await page.call("Page.navigate", url=f"{gateway.url}/ui/")
        await page.until("document.getElementById('state')?.dataset.state === 'live'")
        yield page, gateway


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.textContent"


async def look(page: Browser, name: str, folder: Path) -> None:
    """Pictures of the whole page, large and small, light and dark; nothing may overflow."""
    pictures = Path(os.environ.get("SEMKV_UI_PICTURES", folder))
    for width, height in ((1440, 1000), (390, 844)):
        for scheme in ("light", "dark"):
            await page.screen(width, height, scheme)
            await page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"overflows at {width}"
            assert (await page.picture(pictures / f"{name}-{width}-{scheme}.png")).stat().st_size > 10_000
    await page.screen(1280, 900, "light")


async def test_it_shows_what_happens_and_acts(
    stand: tuple[Browser, Gateway], nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], tmp_path: Path
) -> None:
    page, gateway = stand
    await page.until(text("#engines .none") + "?.includes('No engine is live')")
    for rank in range(2):
        held = Tiered(disk=set(BILLING) | set(SUPPORT), cpu=set(SUPPORT))
        rank_of(held, rank=rank, world_size=2)
    await page.until("document.querySelectorAll('.rank').length === 2")
    await page.until(text(".rank .amount") + "?.includes('15 of 48 KiB · 15 chunks')")
    assert await page.evaluate("document.querySelector('.used.cpu').style.width") == "31.25%"

    # Conversations: chunks that are shared stand once, and the others branch off.
    await publish(
        nats_server.url,
        finished("billing", BILLING, 1, 0),
        finished("support", SUPPORT, 2, 384),
        finished(HOSTILE, BILLING[:3], 3, 192),
    )
    await page.until("document.querySelectorAll('.chain').length === 3")
    cells = "document.querySelectorAll('#chains .cell').length"
    assert await page.evaluate(cells) == len(set(BILLING) | set(SUPPORT))
    assert await page.evaluate("document.querySelectorAll('#chains .cell.shared').length") == 6
    assert await page.evaluate("document.querySelectorAll('#chains .branch').length") == 2
    names = "[...document.querySelectorAll('.chain b')].map((name) => name.textContent)"
    assert sorted(await page.evaluate(names)) == sorted([HOSTILE, "billing", "support"])
    assert await page.evaluate("document.title") == "semkv", "a session's name is text, never markup"
    assert await page.evaluate(text("#requests")) == "3"
    # Where they are is asked for by itself.
    await page.until("document.querySelectorAll('#chains .cell.disk').length === 18")
    assert await page.evaluate("document.querySelectorAll('#chains .cell.cpu').length") == 15

    # A button's command, rank by rank, and the tiers that it fills.
    await page.evaluate("document.querySelector('[aria-label=\"prefetch billing\"]').click()")
    await page.until("document.querySelectorAll('#commands .state.succeeded').length === 2")
    counted = await page.evaluate(text("#commands .chunks"))
    assert set(counted.split(", ")) == {"18 loaded", "6 already there"}
    await page.until("document.querySelectorAll('#chains .cell.cpu').length === 33")
    await page.until("document.querySelector('.used.cpu').style.width === '68.75%'")
    await page.evaluate("document.querySelector('[aria-label=\"evict support\"]').click()")
    await page.until("document.querySelectorAll('#chains .cell.cpu').length === 18")
    await page.until("document.querySelector('.used.cpu').style.width === '37.5%'")

    # Somebody else's command, while it runs, when it has ended, and what it was worth.
    async with connect(nats_server.url, client="agent-7") as kv:
        handle = await kv.prefetch([*SHARED, 999])
        await handle.result(30)
    await page.until("document.getElementById('commands').textContent.includes('by agent-7')")
    await page.until("document.querySelectorAll('#commands .state.partial').length === 2")
    outcome = Outcome(
        tenant="default", domain=DOMAIN.fingerprint, instance="e0", command_id=handle.command_id, rank=0, useful=5,
        wasted=1,
    )  # fmt: skip
    await publish(nats_server.url, outcome)
    assert await page.until(text("#commands .outcome")) == "later: 5 useful, 1 wasted"
    assert await page.evaluate(text("#useful")) == "5"

    # Its trace, from where the gateway finds traces; then one of a file.
    await page.evaluate("[...document.querySelectorAll('#commands .link')].pop().click()")
    for _ in range(100):  # the ranks export theirs in batches
        if await page.evaluate("document.querySelectorAll('#waterfall .span .waits').length") == 2:
            break
        await page.evaluate("[...document.querySelectorAll('#commands .link')].pop().click()")
        await asyncio.sleep(0.1)
    assert "kv.tier.load disk→cpu" in await page.evaluate(text("#waterfall"))
    await look(page, "ui", tmp_path)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SPANS))
    node = await page.call("Runtime.evaluate", expression="document.getElementById('file')")
    await page.call("DOM.setFileInputFiles", files=[str(file)], objectId=node["result"]["objectId"])
    await page.until("document.querySelectorAll('#waterfall .span').length === 3")
    assert (await gateway.client.get(f"/memory/traces/{'0' * 32}")).status_code == 404
    assert [problem for problem in page.problems if "404" not in problem] == []


async def test_long_and_many_conversations_stay_readable(
    stand: tuple[Browser, Gateway], nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], tmp_path: Path
) -> None:
    page, _ = stand
    for rank in range(9):
        rank_of(Tiered(disk=range(3000)), rank=rank, world_size=9)
    root = tuple(range(40))
    await publish(
        nats_server.url,
        *(
            finished(f"session-{n}", (*root[: n % 41], *range(1000 * n, 1000 * n + 13 * n)), n, 64)
            for n in range(1, 60)
        ),
    )
    await page.until(text("#chains") + "?.includes('and 19 older conversations')")
    assert await page.evaluate("document.querySelectorAll('.chain').length") == 40
    await page.until("document.querySelectorAll('.rank').length === 9")
    engines = "(({ scrollHeight, clientHeight }) => scrollHeight > clientHeight && clientHeight < 600)"
    assert await page.evaluate(f"{engines}(document.getElementById('engines'))"), "many ranks scroll in their place"
    await look(page, "ui-many", tmp_path)
    widest = "Math.max(...[...document.querySelectorAll('.cell')].map((cell) => cell.getBoundingClientRect().right))"
    assert await page.evaluate(f"{widest} <= innerWidth")


async def test_it_says_that_nats_is_away_and_back(
    stand: tuple[Browser, Gateway], nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], tmp_path: Path
) -> None:
    page, _ = stand
    rank_of(Tiered(disk=set(BILLING)))
    await publish(nats_server.url, finished("billing", BILLING, 1, 0))
    await page.until(
        "document.querySelectorAll('.chain').length === 1 && document.querySelectorAll('.rank').length === 1"
    )
    nats_server.stop()
    try:
        await page.until(text("#state") + "?.includes('NATS is away')")
        assert await page.evaluate("getComputedStyle(document.getElementById('engines')).opacity") == "0.7"
        await page.evaluate("document.querySelector('[aria-label=\"prefetch billing\"]').click()")
        await page.until(text("#notice") + "?.startsWith('prefetch billing: ')")
        await look(page, "ui-away", tmp_path)
    finally:
        nats_server.start()
    await page.until(text("#state") + " === 'live'")
    assert await page.evaluate("document.getElementById('notice').hidden"), "what was wrong is over"
    await page.evaluate("document.querySelector('[aria-label=\"prefetch billing\"]').click()")
    await page.until("document.querySelectorAll('#commands .state.succeeded').length === 1")


async def test_it_asks_for_a_token(settings: GatewaySettings, tmp_path: Path) -> None:
    guarded = replace(settings, tokens=(Token("someone", "a-long-enough-token"),))
    async with running(guarded) as gateway, Browser(tmp_path / "profile") as browser:
        assert (await gateway.client.get("/ui/app.js")).status_code == 200
        assert (await gateway.client.get("/memory/engines")).status_code == 401
        await browser.call("Page.navigate", url=f"{gateway.url}/ui/")
        for token, said in (
            ("", "a token is needed"),
            ("another-token-of-ours", "the gateway does not know this token"),
        ):
            if token:
                await browser.evaluate(f"document.getElementById('token').value = '{token}'; {CONNECT}")
            await browser.until(f"{text('#state')} === '{said}' && !document.getElementById('login').hidden")
            assert await browser.evaluate(text("#engines")) == "…", "nobody knows yet who is live"
        await look(browser, "ui-token", tmp_path)
        await browser.evaluate(f"document.getElementById('token').value = 'a-long-enough-token'; {CONNECT}")
        await browser.until("document.getElementById('state').dataset.state === 'live'")
        assert await browser.evaluate("document.getElementById('login').hidden")


async def test_the_page_needs_nothing_from_elsewhere(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for name in (
            "",
            "app.js",
            "chains.js",
            "commands.js",
            "dom.js",
            "engines.js",
            "forest.js",
            "gateway.js",
            "trace.js",
            "style.css",
        ):
            answer = await client.get(f"/ui/{name}")
            assert answer.status_code == 200
            assert "https://" not in answer.text and "//cdn" not in answer.text
