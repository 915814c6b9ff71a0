# SPDX-License-Identifier: Apache-2.0
"""Hashes go out only while the ranks that announce themselves share the scheduler's domain, on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from semkv.bus.connection import connect_nats
from semkv.bus.domain import HashDomain
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import EngineInfo
from semkv.bus.registry import Announcer
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.streams import ensure_streams
from semkv.engine_hooks.agreement import Agreement, AgreementState
from tests.engine_hooks.capture import Capture
from tests.engine_hooks.test_publisher import domain, note, publisher, running


async def _announce(url: str, rank_domain: HashDomain, done: asyncio.Event, ready: threading.Event) -> None:
    from semkv.bus.connection import Link

    settings, link = BusSettings(url=url), Link()
    connection = await connect_nats(settings, name="rank", link=link)
    await ensure_streams(connection, settings)

    def describe() -> EngineInfo:
        return EngineInfo(
            domain=rank_domain.fingerprint,
            instance="e",
            epoch=1,
            rank=0,
            world_size=1,
            role=Role.STORAGE,
            hash_domain=rank_domain,
        )

    announcer = Announcer(connection, link, describe)
    announcer.start()
    ready.set()
    await done.wait()
    await announcer.stop()
    await connection.close()


@contextlib.contextmanager
def announced(url: str, rank_domain: HashDomain) -> Iterator[None]:
    """A rank that announces itself, in a thread."""
    ready, held = threading.Event(), {}

    async def main() -> None:
        held["loop"], held["done"] = asyncio.get_running_loop(), asyncio.Event()
        await _announce(url, rank_domain, held["done"], ready)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        held["loop"].call_soon_threadsafe(held["done"].set)
        thread.join(10)


def test_hashes_are_published_once_the_ranks_agree(nats_server: EmbeddedServer) -> None:
    agreement = Agreement(domain(), 1)
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url, agreement=agreement)) as made:
        made.offer(note(1))
        time.sleep(0.5)
        assert not seen.events()
        with announced(nats_server.url, domain()):
            (event,) = seen.finished("cmpl-1")
            assert event.hashes_status == "known" and agreement.state is AgreementState.AGREED


def test_a_rank_with_another_domain_makes_hashes_unstable(
    nats_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    agreement = Agreement(domain(), 1)
    with (
        Capture(nats_server.url) as seen,
        running(publisher(nats_server.url, agreement=agreement)) as made,
        announced(nats_server.url, domain(probe=7, layout="other")),
    ):
        made.offer(note(1))
        (event,) = seen.finished("cmpl-1")
        assert event.hashes_status == "unstable" and event.chunk_hashes == ()
        assert event.reason is not None and "probe" in event.reason and "layout" in event.reason
        time.sleep(1.5)  # the announcements go on: the line is not repeated
    lines = [record.getMessage() for record in caplog.records if "not published" in record.getMessage()]
    assert len(lines) == 1 and "PYTHONHASHSEED" in lines[0]


def test_no_rank_at_all_ends_in_unstable_not_in_silence(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semkv.engine_hooks import event_loop

    monkeypatch.setattr(event_loop, "SETTLE_S", 0.3)
    agreement = Agreement(domain(), 2)
    with Capture(nats_server.url) as seen, running(publisher(nats_server.url, agreement=agreement)) as made:
        made.offer(note(1))
        (event,) = seen.finished("cmpl-1")
        assert event.hashes_status == "unstable" and "rank 0, 1" in (event.reason or "")
