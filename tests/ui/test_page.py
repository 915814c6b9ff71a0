# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser against a real gateway: live, clickable, nothing overflowing, light and dark.

Pictures go to SEMKV_UI_PICTURES where that is set, so that a person can look at them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import nats
import pytest

from semkv.bus import codec, subjects
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished, Outcome
from semkv.consumers.gateway.settings import GatewaySettings, Token
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import DOMAIN, Gateway, running
from tests.consumers.rank.stand_in import StandInStorage
from tests.ui.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

SHARED = tuple(range(1, 7))
BILLING = (*SHARED, *range(100, 118))
SUPPORT = (*SHARED, *range(200, 209))
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


@pytest.fixture
async def page(gateway: Gateway, tmp_path: Path):
    async with Browser(tmp_path / "profile") as browser:
        await browser.screen(1280, 900, "light")
        await browser.call("Page.navigate", url=f"{gateway.url}/ui/")
        yield browser


async def test_it_shows_what_happens_and_acts(
    page: Browser,
    gateway: Gateway,
    nats_server: EmbeddedServer,
    rank_of: Callable[..., RankWorker],
    tmp_path: Path,
) -> None:
    rank_of(StandInStorage(disk=set(BILLING) | set(SUPPORT), cpu=set(SUPPORT)))
    await page.until("document.querySelector('.rank h3')?.textContent.startsWith('e0.0')")
    await page.until("document.getElementById('state').dataset.state === 'live'")
    await publish(
        nats_server.url,
        finished("billing", BILLING, 1, 0),
        finished("support", SUPPORT, 2, 384),
        finished(HOSTILE, BILLING[:3], 3, 192),
    )
    await page.until("document.querySelectorAll('.chain').length === 3")
    assert await page.evaluate("document.querySelectorAll('.cell.shared[data-hash]').length") == 6 + 6 + 3
    assert HOSTILE in await page.evaluate("document.querySelector('.chain b').textContent")
    assert await page.evaluate("document.title") == "semkv", "a session's name is text, never markup"
    assert await page.evaluate("document.getElementById('requests').textContent") == "3"

    await page.evaluate("document.querySelector('[aria-label=\"prefetch billing\"]').click()")
    await page.until("document.querySelector('#commands td:nth-child(3)')?.textContent === 'succeeded'")
    counted = await page.evaluate("document.querySelector('#commands td:nth-child(4)').textContent")
    assert set(counted.split(", ")) == {"18 loaded", "6 already_there"}
    await page.until("document.querySelectorAll('#chains .cell.cpu').length >= 24")

    command_id = (await gateway.post("prefetch", {"chunk_hashes": ["0000000000000064"], "lookup_id": "x"})).json()[
        "command_id"
    ]
    await publish(
        nats_server.url,
        Outcome(
            tenant="default",
            domain=DOMAIN.fingerprint,
            instance="e0",
            command_id=command_id,
            rank=0,
            useful=5,
            wasted=1,
        ),
    )
    await page.until("document.getElementById('useful').textContent === '5'")
    await page.until(f"document.getElementById('commands').textContent.includes('{command_id[-6:]}')")

    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SPANS))
    node = await page.call("Runtime.evaluate", expression="document.getElementById('file')")
    await page.call("DOM.setFileInputFiles", files=[str(file)], objectId=node["result"]["objectId"])
    await page.until("document.querySelectorAll('#waterfall .span').length === 3")
    assert "disk→cpu" in await page.evaluate("document.getElementById('waterfall').textContent")

    pictures = Path(os.environ.get("SEMKV_UI_PICTURES", tmp_path))
    for width, height in ((1440, 1000), (390, 844)):
        for scheme in ("light", "dark"):
            await page.screen(width, height, scheme)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"overflows at {width}"
            picture = await page.picture(pictures / f"ui-{width}-{scheme}.png")
            assert picture.stat().st_size > 10_000
    assert page.problems == []


async def test_it_asks_for_a_token(settings: GatewaySettings, tmp_path: Path) -> None:
    guarded = replace(settings, tokens=(Token("someone", "a-long-enough-token"),))
    async with running(guarded) as gateway, Browser(tmp_path / "profile") as browser:
        assert (await gateway.client.get("/ui/app.js")).status_code == 200
        assert (await gateway.client.get("/memory/engines")).status_code == 401
        await browser.call("Page.navigate", url=f"{gateway.url}/ui/")
        await browser.until("document.getElementById('login')?.hidden === false")
        await browser.evaluate(
            "document.getElementById('token').value = 'a-long-enough-token';"
            "document.querySelector('#login button').click()"
        )
        await browser.until("document.getElementById('state').dataset.state === 'live'")


async def test_the_page_needs_nothing_from_elsewhere(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for name in ("", "app.js", "trace.js", "style.css"):
            answer = await client.get(f"/ui/{name}")
            assert answer.status_code == 200
            assert "https://" not in answer.text and "//cdn" not in answer.text
