# SPDX-License-Identifier: Apache-2.0
"""Chains: what a turn dropped, and that what is not known drops nothing."""

from __future__ import annotations

import pytest

from semkv.consumers.memory.chains import Chain, diff_deleted, extends
from semkv.consumers.memory.store import Kept, Store, StoreError
from semkv.consumers.memory.store.chains import MAX_LEAVES


@pytest.mark.parametrize("new", [None, (), []])
def test_an_unknown_or_empty_write_back_deletes_nothing(new: tuple[int, ...] | None) -> None:
    assert diff_deleted((1, 2, 3), new) == ()


def test_diff_deleted_keeps_the_common_prefix_and_what_others_use() -> None:
    assert diff_deleted((1, 2, 3, 4), (1, 2, 9)) == (3, 4)
    assert diff_deleted((1, 2, 3, 4), (1, 2, 3, 4, 5)) == ()
    assert diff_deleted((1, 2, 3, 4), (9, 8), keep=[(1, 2, 7)]) == (3, 4)
    # Unordered hashes, as an agent that keeps them in a map sends them: what is there at all stays.
    assert set(diff_deleted((3, 1, 2), (2, 9, 1))) == {3}


def test_extends() -> None:
    assert (
        extends((1, 2, 3), (1, 2)) and extends((1,), (1,)) and not extends((1,), (1, 2)) and not extends((2, 1), (1,))
    )


def chain(session: str, *hashes: int, topic: str = "main", **more: object) -> Chain:
    return Chain(session, hashes, domain="d0", topic=topic, **more)  # type: ignore[arg-type]


def test_a_chain_replaces_the_leaf_it_extends_and_a_prefix_is_ignored() -> None:
    store = Store()
    assert store.chains.add(chain("s", 1, 2)) is Kept.LEAF
    assert store.chains.add(chain("s", 1, 2, 3)) is Kept.EXTENDED
    assert store.chains.add(chain("s", 1, 2)) is Kept.PREFIX
    assert [leaf.hashes for leaf in store.chains.leaves("s")] == [(1, 2, 3)]


def test_a_title_prompt_beside_the_conversation_is_not_the_conversation() -> None:
    store = Store()
    store.chains.add(chain("s", *range(1, 20)))
    store.chains.add(chain("s", 77, 78))
    current = store.chains.current("s")
    assert current is not None and current.hashes == tuple(range(1, 20))


def test_going_on_with_the_first_topic_of_a_conversation_reads_all_that_came_after() -> None:
    store = Store()
    store.chains.add(chain("s", 1, 2, topic="a"))
    store.chains.add(chain("s", 1, 2, 3, 4, topic="b"))
    found = store.chains.for_topic("s", "a")
    assert found is not None and found.hashes == (1, 2, 3, 4)
    # After a compaction the topic's own chain is what is left of it.
    store.chains.drop(found)
    again = store.chains.for_topic("s", "a")
    assert again is not None and again.hashes == (1, 2)


def test_a_session_keeps_a_bounded_number_of_leaves() -> None:
    store = Store()
    for i in range(MAX_LEAVES + 5):
        store.chains.add(chain("s", 1, 100 + i))
    assert len(store.chains.leaves("s")) == MAX_LEAVES
    assert store.chains.leaves("s")[0].hashes == (1, 100 + MAX_LEAVES + 4)


def test_a_chain_without_a_session_waits_for_its_request_to_be_named() -> None:
    store = Store()
    store.chains.add(chain("", 5, 6, request_id="r1"))
    adopted = store.chains.name_request("r1", "s", "billing", 1)
    assert adopted is not None and (adopted.session, adopted.topic, adopted.hashes) == ("s", "billing", (5, 6))
    # … and the other way round: the name first.
    store.chains.name_request("r2", "s", "billing", 2)
    assert store.chains.owner("r2") == ("s", "billing")


def test_the_extremes_of_a_hash_survive_the_file(tmp_path: object) -> None:
    path = f"{tmp_path}/deep/er/memory.db"
    store = Store(path)
    hashes = (-(2**63), 2**63 - 1, 0, -1)
    store.chains.add(chain("s", *hashes))
    store.close()
    again = Store(path)
    assert again.chains.leaves("s")[0].hashes == hashes
    again.database.execute("PRAGMA user_version=99")
    again.close()
    with pytest.raises(StoreError, match=r"schema 99 is newer than 1"):
        Store(path)
