# SPDX-License-Identifier: Apache-2.0
"""What a rank refuses it refuses with a reason: too much at once, versions of the future, another hash domain."""

from __future__ import annotations

import json

import nats
import pytest

from semkv.bus import KV
from semkv.bus.client import RankName, addressing
from semkv.bus.client.addressing import Target
from semkv.bus.domain import HashDomain
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.status import State
from semkv.consumers.rank import commands
from tests.consumers.rank.conftest import MakeRank, until_live
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts.samples import DOMAIN

OTHER = HashDomain(**{**DOMAIN.model_dump(), "kv_dtype": "fp8", "chunk_size": 16})


async def test_a_rank_that_has_too_much_to_do_says_so(
    make_rank: MakeRank, kv: KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "QUEUE_LIMIT", 2)
    ops = StandInStorage(disk=range(10))
    make_rank(ops)
    ops.gate.clear()
    held = [await kv.prefetch([1]), await kv.prefetch([1])]
    outcome = await (await kv.prefetch([2])).result(30)
    assert outcome.state == State.REJECTED
    assert "busy" in (outcome.reason or "")
    ops.gate.set()
    for handle in held:
        assert (await handle.result(30)).ok
    assert (await (await kv.prefetch([2])).result(30)).ok


async def test_a_version_this_rank_does_not_know_is_rejected_and_said_so(
    nats_server: EmbeddedServer, make_rank: MakeRank
) -> None:
    ops = StandInStorage(disk=[1])
    make_rank(ops)
    nc = await nats.connect(nats_server.url)
    answers = await nc.subscribe("semkv.v1.default.*.res.me.>")
    payload = json.dumps({"command_id": "c1", "client": "me", "chunk_hashes": ["1"], "new": 1}).encode()
    subject = f"semkv.v1.default.{DOMAIN.fingerprint}.cmd.all.prefetch"
    await nc.publish(subject, payload, headers={"Semkv-Type": "prefetch.v9"})
    while "state" not in (answer := json.loads((await answers.next_msg(30)).data)):
        pass
    assert answer["state"] == "rejected"
    assert "prefetch.v9" in answer["reason"]
    assert ops.calls == []
    await nc.close()


async def test_a_rank_whose_domain_is_another_by_now_is_named_with_the_difference(
    make_rank: MakeRank, kv: KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry still showed the old domain: the rank itself says no, and the client says in what they differ."""
    make_rank(StandInStorage(disk=[1]), domain=OTHER)
    await until_live(kv, 1)
    known = Target(DOMAIN.fingerprint, DOMAIN, (RankName("engine-0", 0),))

    async def find(*_: object) -> Target:
        return known

    monkeypatch.setattr(addressing, "find", find)
    outcome = await (await kv.prefetch([1], instance="engine-0")).result(30)
    assert outcome.state == State.REJECTED
    assert outcome.differences == {
        RankName("engine-0", 0): {"kv_dtype": ("bfloat16", "fp8"), "chunk_size": (256, 16)},
    }
    assert "kv_dtype: ours 'bfloat16', its 'fp8'" in (outcome.reason or "")
