# SPDX-License-Identifier: Apache-2.0
"""Retains on the bus: they outlive a rank's process, come whole however long they are, and replace each other."""

from __future__ import annotations

import asyncio

import pytest

from semkv.bus import KV
from semkv.consumers.rank import commands
from tests.consumers.rank.conftest import MakeRank, until_live
from tests.consumers.rank.stand_in import StandInStorage


async def test_a_new_process_of_a_rank_is_told_what_is_retained(make_rank: MakeRank, kv: KV) -> None:
    first = make_rank(StandInStorage(disk=[1]))
    assert (await (await kv.retain("s", [1, 2], ttl_s=600)).result(30)).ok
    first.stop(5)
    second = StandInStorage(disk=[1])
    make_rank(second)
    while not second.retained:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert second.retained == {("default", kv.client, "s"): {1, 2}}


async def test_a_retain_over_the_limit_keeps_all_of_it_and_a_later_one_replaces_it(make_rank: MakeRank, kv: KV) -> None:
    first = make_rank(StandInStorage())
    make_rank(StandInStorage(), instance="engine-1")
    await until_live(kv, 2)
    await (await kv.retain("s", [7], instance="engine-1")).result(30)
    await (await kv.retain("s", [1, 2])).result(30)
    outcome = await (await kv.retain("s", range(9000))).result(30)
    assert outcome.ok
    assert [len(result.chunk_status) for result in outcome.results] == [9000, 9000]
    await (await kv.retain("only", [5], instance="engine-1")).result(30)
    first.stop(5)
    second = StandInStorage()
    make_rank(second)
    key = ("default", kv.client, "s")
    while len(second.retained.get(key, ())) < 9000:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    # What was kept before, and what another instance was asked to keep, is not brought back.
    assert second.retained == {key: set(range(9000))}


async def test_what_is_remembered_of_retains_is_bounded(
    make_rank: MakeRank, kv: KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RETAINED_KEPT", 10)
    ops = StandInStorage()
    worker = make_rank(ops)
    for number in range(20):  # the same session over and over, and others
        for session in ("same", f"s{number}"):
            assert (await (await kv.retain(session, [1, 2, 3])).result(30)).ok
    assert worker._desk is not None
    assert sum(len(hashes) for hashes in worker._desk._retained.values()) <= 10
    assert (await (await kv.release("s0")).result(30)).ok  # forgotten here, not by the storage
    assert ("default", kv.client, "s0") not in ops.retained
