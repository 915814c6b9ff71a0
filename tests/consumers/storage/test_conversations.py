# SPDX-License-Identifier: Apache-2.0
"""Evict, retain, release and locate on a real engine whose forest is fed by the lookups it serves."""

from __future__ import annotations

import pytest

from semkv.bus.status import ChunkStatus, State, Tier
from tests.consumers.storage.agents import Agents
from tests.support.lmcache_engine import Rig

REMOVED, ABSENT, SHARED = ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.SHARED


@pytest.fixture
def agents(rig: Rig) -> Agents:
    return Agents(rig)


def test_a_shared_beginning_stays_for_the_conversation_that_goes_on(rig: Rig, agents: Agents) -> None:
    trunk = rig.tokens(3)
    mine = agents.turn(trunk + rig.tokens(2, seed=1), session="a")
    agents.turn(trunk + rig.tokens(2, seed=2), session="b")
    result = agents.storage.evict(mine, session="a")
    assert result.chunk_status == (SHARED,) * 3 + (REMOVED,) * 2
    assert agents.storage.locate(mine).chunk_tiers == ((Tier.CPU, Tier.DISK),) * 3 + ((),) * 2
    assert agents.turn(trunk + rig.tokens(2, seed=2), session="b")
    rig.check()


def test_force_takes_what_is_shared(rig: Rig, agents: Agents) -> None:
    tokens = rig.tokens(2)
    mine = agents.turn(tokens, session="a")
    agents.turn(tokens, session="b")
    assert agents.storage.evict(mine, session="a").chunk_status == (SHARED,) * 2
    assert agents.storage.evict(mine, session="a", force=True).chunk_status == (REMOVED,) * 2
    rig.check()


def test_what_a_running_request_goes_through_stays(rig: Rig, agents: Agents) -> None:
    tokens = rig.tokens(2)
    mine = agents.turn(tokens)
    running = rig.lookup(tokens)
    assert agents.storage.evict(mine, tiers=(Tier.DISK,)).chunk_status == (SHARED,) * 2
    rig.retrieve(running, tokens)
    agents.feed.finished([running])
    rig.check()


def test_retained_chunks_stay_until_released(rig: Rig, agents: Agents) -> None:
    hashes = agents.turn(rig.tokens(2), session="a")
    kept = agents.storage.retain("client", "a", hashes, 60.0)
    assert kept.state is State.SUCCEEDED
    assert kept.chunk_status == (ChunkStatus.ALREADY_THERE,) * 2
    assert agents.storage.evict(hashes, session="a").chunk_status == (SHARED,) * 2
    assert agents.storage.release("client", "a").reason is None
    assert agents.storage.release("client", "a").reason == "nothing was retained"
    assert agents.storage.evict(hashes, session="a").chunk_status == (REMOVED,) * 2
    rig.check()


def test_retained_chunks_go_when_their_time_is_over(rig: Rig, agents: Agents) -> None:
    hashes = agents.turn(rig.tokens(1), session="a")
    agents.storage.retain("client", "a", hashes, 60.0)
    agents.clock += 61.0
    assert agents.storage.evict(hashes, session="a").chunk_status == (REMOVED,)
    rig.check()


def test_retained_chunks_are_no_victims_of_a_prefetch(rig: Rig, agents: Agents) -> None:
    wanted = agents.turn(rig.tokens(4, seed=1), session="a")
    rig.drop_from_ddr(rig.tokens(4, seed=1))
    kept = agents.turn(rig.tokens(16, seed=2), session="b")
    agents.storage.retain("client", "b", kept, 60.0)
    assert agents.storage.prefetch(wanted).chunk_status[0] is ChunkStatus.NO_MEMORY
    agents.storage.release("client", "b")
    assert agents.storage.prefetch(wanted).state is State.SUCCEEDED
    rig.check()


def test_another_tenant_sees_and_takes_nothing(rig: Rig, agents: Agents) -> None:
    hashes = agents.turn(rig.tokens(2), session="a", tenant="one")
    storage = agents.storage
    assert storage.locate(hashes, tenant="two").chunk_tiers == ((), ())
    assert storage.evict(hashes, tenant="two", session="a", force=True).chunk_status == (ABSENT,) * 2
    assert storage.prefetch(hashes, tenant="two").chunk_status[0] is ChunkStatus.MISSING
    assert storage.retain("client", "a", hashes, 60.0, tenant="two").chunk_status == (ABSENT,) * 2
    assert storage.locate(hashes, tenant="one").usable_prefix == 2
    assert storage.evict(hashes, tenant="one", session="a").chunk_status == (REMOVED,) * 2
    rig.check()
