# SPDX-License-Identifier: Apache-2.0
"""What is left behind a prompt's last whole chunk, on a real engine that stores it (`save_unfull_chunk`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv.bus.status import ChunkStatus, State, Tier
from tests.consumers.storage.agents import Agents
from tests.support.lmcache_engine import Rig

LOADED, MISSING = ChunkStatus.LOADED, ChunkStatus.MISSING
REMOVED, ABSENT, SHARED = ChunkStatus.REMOVED, ChunkStatus.ABSENT, ChunkStatus.SHARED

pytestmark = pytest.mark.parametrize("rig", [{"settings": {"save_unfull_chunk": True}}], indirect=True)


@pytest.fixture
def agents(rig: Rig) -> Agents:
    return Agents(rig)


def prompt(rig: Rig, left: int, *, seed: int = 0) -> list[int]:
    """Two whole chunks and `left` tokens; prompts of one seed begin alike."""
    return rig.tokens(3, seed=seed)[: 2 * rig.chunk_size + left]


def test_a_tail_is_loaded_as_a_chunk_of_its_own_length(rig: Rig, agents: Agents) -> None:
    tokens = prompt(rig, 5)
    hashes = agents.turn(tokens, session="a")
    assert len(hashes) == 3
    rig.drop_from_ddr(tokens)
    result = agents.storage.prefetch(hashes)
    assert result.chunk_status == (LOADED,) * 3
    found = [bytes(rig.cpu.hot_cache[key].byte_array) for key in rig.keys(tokens)]
    assert found == [Path(rig.disk.dict[key].path).read_bytes() for key in rig.keys(tokens)]
    assert len(found[2]) == len(found[0]) * 5 // rig.chunk_size
    assert rig.serve(tokens) == len(tokens), "a request gets all of it"
    rig.check()


@pytest.mark.parametrize(
    ("session", "chunks", "left"), [("a", 3, 2), (None, 3, 2), ("a", 3, 0), (None, 3, 0), ("a", 2, 9)]
)
def test_the_tail_of_a_turn_is_over_with_the_next_turn(
    rig: Rig, agents: Agents, session: str | None, chunks: int, left: int
) -> None:
    first = agents.turn(prompt(rig, 5), session=session)
    second = agents.turn(rig.tokens(4)[: chunks * rig.chunk_size + left], session=session)
    assert second[:2] == first[:2]
    assert first[2] not in second
    assert agents.forest.stats()["conversations"] == 1, "the next turn continues the first, though its tail does not"
    stranger = agents.storage.evict((first[2],), session="b")
    assert stranger.chunk_status == (REMOVED,), "nobody's conversation needs it any more"
    assert agents.storage.evict(second, session=session).chunk_status == (REMOVED,) * len(second)
    rig.check()


@pytest.mark.parametrize("other", ["b", None])
def test_the_tail_of_another_live_conversation_stays(rig: Rig, agents: Agents, other: str | None) -> None:
    tokens = prompt(rig, 5)
    hashes = agents.turn(tokens, session="a")
    assert agents.turn(tokens, session=other) == hashes
    assert agents.storage.evict(hashes, session="a").chunk_status == (SHARED,) * 3
    assert agents.storage.evict(hashes, session="c").chunk_status == (SHARED,) * 3
    assert agents.storage.locate(hashes).chunk_tiers == ((Tier.CPU, Tier.DISK),) * 3
    assert rig.serve(tokens) == len(tokens)
    rig.check()


def test_without_a_session_the_tail_says_which_conversation_goes(rig: Rig, agents: Agents) -> None:
    other = agents.turn(prompt(rig, 5))
    mine = agents.turn(prompt(rig, 9))
    assert mine[:2] == other[:2]
    result = agents.storage.evict(mine)
    assert result.chunk_status == (SHARED, SHARED, REMOVED)
    assert agents.storage.evict(other).chunk_status == (SHARED, SHARED, REMOVED)
    rig.check()


def test_a_running_request_keeps_its_tail(rig: Rig, agents: Agents) -> None:
    tokens = prompt(rig, 5)
    hashes = agents.turn(tokens, session="a")
    running = rig.lookup(tokens)
    assert agents.storage.evict(hashes, session="a").chunk_status == (SHARED,) * 3
    rig.retrieve(running, tokens)
    agents.feed.finished([running])
    rig.check()


def test_a_tail_belongs_to_the_tenants_that_used_it(rig: Rig, agents: Agents) -> None:
    tokens = prompt(rig, 5)
    hashes = agents.turn(tokens, session="a", tenant="one")
    rig.drop_from_ddr(tokens)
    assert agents.storage.prefetch(hashes, tenant="two").chunk_status[0] is MISSING
    assert agents.storage.evict(hashes, tenant="two", session="a").chunk_status == (ABSENT,) * 3
    loaded = agents.storage.prefetch(hashes, tenant="one")
    assert (loaded.state, loaded.chunk_status) == (State.SUCCEEDED, (LOADED,) * 3)
    shorter = agents.turn(prompt(rig, 3), session="a", tenant="one")
    agents.turn(rig.tokens(3), session="a", tenant="one")
    agents.turn(prompt(rig, 7), session="a", tenant="one")  # an earlier turn once more: the leaf goes on beyond it
    assert agents.storage.evict((shorter[2],), tenant="one", session="a").chunk_status == (REMOVED,)
    again = rig.hashes(prompt(rig, 7))[2]
    assert agents.storage.evict((again,), tenant="two", session="a").chunk_status == (ABSENT,)
    assert agents.storage.evict((again,), tenant="one", session="a").chunk_status == (REMOVED,)
    rig.check()
