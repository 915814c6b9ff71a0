# SPDX-License-Identifier: Apache-2.0
"""Which chunks an evict may take: sessions, requests without one, running ones, tenants, retained ones."""

from __future__ import annotations

import pytest

from semkv.consumers.storage.forest import PrefixForest
from tests.consumers.storage.forest.conftest import Clock

SYSTEM = (1, 2, 3)
A, B, C = (*SYSTEM, 10, 11), (*SYSTEM, 20, 21), (*SYSTEM, 30)


def seen(
    forest: PrefixForest, hashes: tuple[int, ...], request: str, session: str | None = None, tenant: str = "default"
) -> None:
    """A request that came and ended."""
    forest.record_lookup(tenant, session, hashes, request)
    forest.finished([request])


def shared(forest: PrefixForest, hashes: tuple[int, ...], session: str | None = None) -> set[int]:
    return set(forest.shared("default", session, hashes))


def test_a_sessions_own_chunks_may_go_and_what_others_use_may_not(forest: PrefixForest) -> None:
    seen(forest, A, "a", "s-a")
    assert shared(forest, A, "s-a") == set()
    assert shared(forest, A, "s-b") == set(A)
    seen(forest, B, "b", "s-b")
    assert shared(forest, A, "s-a") == set(SYSTEM)
    assert shared(forest, A) == set(A), "no leaf without a session ends there"


def test_all_leaves_of_a_session_are_its_own(forest: PrefixForest) -> None:
    seen(forest, A, "1", "s")
    seen(forest, B, "2", "s")
    assert shared(forest, (*A, *B), "s") == set()
    assert forest.stats()["conversations"] == 2


def test_a_chain_that_grows_replaces_its_leaf(forest: PrefixForest) -> None:
    for length in (2, 3, 5):
        seen(forest, A[:length], f"r{length}", "s")
    assert forest.stats()["conversations"] == 1
    seen(forest, A[:3], "again", "s")
    assert forest.stats()["conversations"] == 1, "a prefix of a newer leaf is ignored"
    assert shared(forest, A, "s") == set()


def test_without_sessions_a_grown_chain_replaces_exactly_one_leaf(forest: PrefixForest) -> None:
    seen(forest, SYSTEM, "first")
    seen(forest, SYSTEM, "second")
    seen(forest, A, "first grows")
    assert forest.stats()["conversations"] == 2
    assert shared(forest, A) == set(SYSTEM), "the second conversation still needs the prefix"


def test_equal_chains_without_sessions_protect_each_other(forest: PrefixForest) -> None:
    seen(forest, A, "one")
    assert shared(forest, A) == set()
    seen(forest, A, "two")
    assert shared(forest, A) == set(A)


def test_a_chain_inside_anothers_is_safe_whoever_came_last(forest: PrefixForest) -> None:
    seen(forest, A, "long")
    seen(forest, SYSTEM, "short")
    assert shared(forest, A) == set(SYSTEM)
    assert shared(forest, SYSTEM) == set(SYSTEM), "the long one goes through them"


def test_a_sessions_prefix_is_safe_from_a_chain_without_one(forest: PrefixForest) -> None:
    seen(forest, SYSTEM, "named", "s")
    seen(forest, A, "unnamed")
    assert shared(forest, A) == set(SYSTEM)


def test_whoever_names_chunks_behind_a_leaf_is_not_that_conversation(forest: PrefixForest, clock: Clock) -> None:
    seen(forest, A, "long")
    clock.now += 3000
    seen(forest, SYSTEM, "short")
    clock.now += 1000
    assert forest.stats()["conversations"] == 1, "the long one is over"
    assert shared(forest, A) == set(SYSTEM)
    assert shared(forest, SYSTEM) == set()


def test_a_running_request_is_never_exempt_without_a_session(forest: PrefixForest) -> None:
    forest.record_lookup("default", None, A, "running")
    assert shared(forest, A) == set(A)
    forest.finished(["running"])
    assert shared(forest, A) == set()


def test_a_running_request_is_not_replaced_by_another_conversation(forest: PrefixForest) -> None:
    forest.record_lookup("default", None, SYSTEM, "running")
    seen(forest, A, "other")
    assert shared(forest, A) == set(SYSTEM)


def test_children_of_one_request_are_one_conversation(forest: PrefixForest) -> None:
    for child in range(4):
        forest.record_lookup("default", None, A, f"{child}_cmpl-x-1234abcd")
        forest.finished([f"{child}_cmpl-x-1234abcd"])
    assert forest.stats()["conversations"] == 1
    assert shared(forest, A) == set()


def test_a_request_that_is_looked_up_again_is_the_same_conversation(forest: PrefixForest) -> None:
    forest.record_lookup("default", None, A[:3], "preempted")
    forest.record_lookup("default", None, A, "preempted")
    forest.finished(["preempted"])
    assert forest.stats()["conversations"] == 1
    assert shared(forest, A) == set()


def test_leaves_expire_when_idle_and_running_ones_do_not(forest: PrefixForest, clock: Clock) -> None:
    seen(forest, A, "idle", "s-a")
    forest.record_lookup("default", "s-b", B, "running")
    clock.now += 3600
    assert shared(forest, A) == set(SYSTEM)
    assert forest.stats()["conversations"] == 1
    forest.finished(["running"])
    clock.now += 3600
    assert shared(forest, A) == set()
    assert forest.stats() | {"chunks": 0} == dict.fromkeys(forest.stats(), 0)


def test_a_request_whose_end_was_never_seen_expires_too(forest: PrefixForest, clock: Clock) -> None:
    forest.record_lookup("default", None, A, "lost")
    clock.now += 6 * 3600
    assert shared(forest, A) == set()


def test_a_session_keeps_its_sixteen_newest_leaves(forest: PrefixForest) -> None:
    for branch in range(20):
        seen(forest, (*SYSTEM, 100 + branch), f"r{branch}", "s")
    assert forest.stats()["conversations"] == 16
    assert forest.idle(103)
    assert not forest.idle(104)
    assert not forest.idle(1)


def test_tenants_do_not_see_each_others_chunks(forest: PrefixForest) -> None:
    seen(forest, A, "mine", tenant="a")
    assert forest.visible("a", 10)
    assert not forest.visible("b", 10)
    seen(forest, SYSTEM, "theirs", tenant="b")
    assert forest.visible("b", 1)
    assert not forest.visible("b", 10)
    assert set(forest.shared("a", None, A)) == set(SYSTEM)
    assert not forest.visible("default", 99), "with more than one tenant an unknown chunk is nobody's"


def test_an_unknown_chunk_belongs_to_the_engines_own_tenant(forest: PrefixForest) -> None:
    assert forest.visible("default", 99)
    assert not forest.visible("b", 99)


def test_chunks_remember_their_tenants_when_the_conversation_is_over(forest: PrefixForest, clock: Clock) -> None:
    seen(forest, A, "a", tenant="a")
    clock.now += 4000
    assert shared(forest, A) == set()
    assert forest.visible("a", 10)
    assert not forest.visible("b", 10)


def test_retained_chunks_stay_until_released_or_over(forest: PrefixForest, clock: Clock) -> None:
    seen(forest, A, "a", "s")
    assert set(forest.retain("default", "client", "s", (10, 11), 60)) == {10, 11}
    assert shared(forest, A, "s") == {10, 11}
    assert forest.retained(10)
    assert forest.release("default", "client", "s") == 2
    assert shared(forest, A, "s") == set()
    forest.retain("default", "client", "s", (10,), 60)
    clock.now += 60
    assert not forest.retained(10)
    assert shared(forest, A, "s") == set()


def test_two_holders_keep_a_chunk_until_both_let_go(forest: PrefixForest) -> None:
    seen(forest, A, "a", "s")
    for client in ("x", "y"):
        forest.retain("default", client, "s", (10, 10), 60)
    forest.release("default", "x", "s")
    assert forest.retained(10)
    forest.release("default", "y", "s")
    assert not forest.retained(10)


def test_nobody_retains_what_is_not_theirs(forest: PrefixForest) -> None:
    seen(forest, A, "a", tenant="a")
    assert forest.retain("b", "client", "s", A, 60) == ()


def test_a_second_retain_replaces_the_first(forest: PrefixForest) -> None:
    seen(forest, A, "a", "s")
    forest.retain("default", "client", "s", (10,), 60)
    forest.retain("default", "client", "s", (11,), 60)
    assert not forest.retained(10)
    assert forest.retained(11)
    assert forest.retain("default", "client", "s", (11,), 0) == ()
    assert not forest.retained(11)


def test_one_hash_behind_two_prefixes_is_an_anomaly_and_is_shared(forest: PrefixForest, clock: Clock) -> None:
    seen(forest, (1, 2, 50, 51), "a", "s")
    seen(forest, (7, 8, 50, 52), "b", "s")
    assert forest.stats()["anomalies"] == 1
    assert shared(forest, (1, 2, 50, 51, 7, 8, 52), "s") == {50}
    clock.now += 4000
    assert shared(forest, (1, 2, 50, 51, 7, 8, 52)) == set()


def test_forgotten_chunks_give_their_place_to_new_ones(clock: Clock) -> None:
    forest = PrefixForest("default", clock=clock, dead_limit=10)
    for part in range(50):
        seen(forest, tuple(range(part * 100 + 1, part * 100 + 21)), f"r{part}", "s")
        assert not forest.idle(part * 100 + 1)
        clock.now += 4000
    assert forest.stats()["chunks"] == 10
    assert len(forest._nodes._hash) <= 30


@pytest.mark.parametrize("hashes", [(), (5,)])
def test_short_chains_do_no_harm(forest: PrefixForest, hashes: tuple[int, ...]) -> None:
    seen(forest, hashes, "r")
    assert shared(forest, hashes) == set()
