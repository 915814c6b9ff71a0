# SPDX-License-Identifier: Apache-2.0
"""Reading from a time on, with several filters: every message that matches comes, none that does not."""

import asyncio
import time

import pytest

from semkv.bus.connection import Link, connect_nats
from semkv.bus.reader import OrderedReader, covering, matches
from semkv.bus.settings import BusSettings
from semkv.bus.streams import EVENTS, ensure_streams


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["a.b.c"], "a.b.c"),
        (["a.*.x.finished", "a.*.x.heartbeat"], "a.*.x.*"),
        (["a.*.*.cmd.me.>", "a.*.d.cmd.all.>"], "a.*.*.cmd.*.>"),
        (["a.b", "a.b.c"], "a.>"),
    ],
)
def test_one_pattern_covers_all(patterns, expected):
    assert covering(patterns) == expected


@pytest.mark.parametrize(
    ("pattern", "subject", "does"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b.c", "a.b", False),
    ],
)
def test_matching_is_that_of_nats(pattern, subject, does):
    assert matches(pattern, subject) is does


async def test_a_start_by_time_with_two_filters_skips_nothing(nats_server):
    link = Link()
    settings = BusSettings(url=nats_server.url)
    nc = await connect_nats(settings, name="test", link=link)
    try:
        await ensure_streams(nc, settings)
        subject = "semkv.v1.default.d.evt.e."

        async def publish(kind: str, count: int = 1) -> None:
            for _ in range(count):
                await nc.request(subject + kind, b"x")

        await publish("finished")
        start = time.time_ns()
        await publish("finished", 19)
        await publish("heartbeat")
        await publish("outcome")
        await publish("finished")
        filters = [subject + "finished", subject + "heartbeat"]
        async with OrderedReader(nc, link, EVENTS, filters, start_time_ns=start) as reader:
            read = [(await asyncio.wait_for(anext(aiter(reader)), 10)) for _ in range(21)]
        assert [message.seq for message in read] == [*range(2, 22), 23]
        assert {message.subject.rpartition(".")[2] for message in read} == {"finished", "heartbeat"}
    finally:
        await nc.close()
