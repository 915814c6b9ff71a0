# SPDX-License-Identifier: Apache-2.0
"""The in-place upgrade of LMCache's real lookup clients, with real sockets."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("lmcache")

from lmcache.v1.lookup_client import lmcache_async_lookup_client as async_client
from lmcache.v1.lookup_client.async_lookup_message import LookupRequestMsg

from semkv.engine_hooks.lookup_client import (
    GROUP,
    SESSION_LABEL,
    TENANT_LABEL,
    HashRecordingLookupClient,
    HashRecords,
    HashTexts,
    can_listen,
    chain,
    innermost,
    is_recording,
    records_of,
    upgrade,
)
from semkv.engine_hooks.patches.lookup_forward import forward_cancel
from semkv.engine_hooks.recompute import Recompute
from tests.engine_hooks.clients import lookup_client

CHUNK = 16


def own_chain(client: Any, tokens: list[int]) -> list[str]:
    database = innermost(client).token_database
    inner = getattr(database.process_tokens, "inner", database.process_tokens)
    return [f"{value:x}" for _, _, value in inner(tokens, make_key=False)]


def sent_by(client: Any) -> list[bytes]:
    """Catch what the client pushes to the ranks."""
    caught: list[bytes] = []

    class Socket:
        def send(self, data: bytes, copy: bool = True) -> None:
            caught.append(bytes(data))

        def close(self, linger: int = 0) -> None:
            return

    inner = innermost(client)
    for socket in inner.push_sockets:
        socket.close(linger=0)
    inner.push_sockets = [Socket() for _ in inner.push_sockets]
    return caught


def test_upgrade_keeps_the_object_its_sockets_and_its_thread() -> None:
    with lookup_client() as client:
        before = (id(client), client.pull_socket, tuple(client.push_sockets), client.thread, client.token_database)
        assert HashRecordingLookupClient.from_existing(client) is client
        assert (
            id(client),
            client.pull_socket,
            tuple(client.push_sockets),
            client.thread,
            client.token_database,
        ) == before
        assert client.thread.is_alive()
        assert isinstance(client, HashRecordingLookupClient)
        assert isinstance(client, async_client.LMCacheAsyncLookupClient)


def test_direct_construction_is_refused_and_names_the_way() -> None:
    with pytest.raises(TypeError, match="from_existing"):
        HashRecordingLookupClient(None, None)


def test_from_existing_refuses_what_it_cannot_upgrade() -> None:
    with pytest.raises(TypeError, match="enable_async_loading"):
        HashRecordingLookupClient.from_existing(object())


@pytest.mark.parametrize("wrapped", [{}, {"hit_miss_ratio": 0.5}, {"enable_chunk_statistics": True}, "both"])
def test_through_any_chain_of_decorators(wrapped: Any) -> None:
    settings = {"hit_miss_ratio": 0.5, "enable_chunk_statistics": True} if wrapped == "both" else wrapped
    with lookup_client(**settings) as client:
        outermost, depth = type(client), len(list(chain(client)))
        assert depth == 1 + len(settings)
        assert HashRecordingLookupClient.from_existing(client) is client
        assert type(client) is outermost or depth == 1
        tokens = list(range(40))
        assert client.lookup(tokens, "r") is None
        assert innermost(client).get_cached_hashes("r") == own_chain(client, tokens)


def test_a_second_upgrade_changes_nothing() -> None:
    with lookup_client() as client:
        HashRecordingLookupClient.from_existing(client)
        records, process = records_of(client), client.token_database.process_tokens
        HashRecordingLookupClient.from_existing(client)
        assert records_of(client) is records and client.token_database.process_tokens is process


def test_lmcaches_own_lookup_body_runs_and_sends_the_same() -> None:
    tokens = list(range(70))
    with lookup_client() as plain:
        caught_plain = sent_by(plain)
        plain.lookup(tokens, "r", {"lmcache.tag.user": "u"})
    with lookup_client() as client:
        caught = sent_by(client)
        HashRecordingLookupClient.from_existing(client)
        client.lookup(tokens, "r", {"lmcache.tag.user": "u"})
    assert caught == caught_plain
    source = inspect.getsource(async_client.LMCacheAsyncLookupClient.lookup)
    assert "HashRecords" not in source


def test_pop_clear_and_cancel() -> None:
    with lookup_client() as client:
        HashRecordingLookupClient.from_existing(client)
        client.lookup(list(range(32)), "r")
        client.clear_lookup_status("r")
        client.cancel_lookup("r")
        assert "r" in records_of(client)
        first = client.get_cached_hashes("r")
        assert first is not None and len(first) == 2
        assert client.get_cached_hashes("r") is None
        assert client.get_cached_hashes("never") is None
        assert len(records_of(client)) == 0


@pytest.mark.parametrize(
    ("tokens", "unfull", "count"), [(0, False, 0), (15, False, 0), (16, False, 1), (40, False, 2), (40, True, 3)]
)
def test_counts(tokens: int, unfull: bool, count: int) -> None:
    with lookup_client(save_unfull_chunk=unfull) as client:
        HashRecordingLookupClient.from_existing(client)
        client.lookup(list(range(tokens)), "r")
        assert len(client.get_cached_hashes("r")) == count


def test_the_record_is_bounded_first_in_first_out() -> None:
    records = HashRecords(capacity=2)
    with lookup_client() as client:
        HashRecordingLookupClient.from_existing(client, records=records)
        for name in ("a", "b", "c"):
            client.lookup(list(range(20)), name)
        assert len(records) == 2 and "a" not in records and records.overflowed == 1
        client.lookup(list(range(20)), "c")  # already there: nobody is pushed out
        assert "b" in records and records.overflowed == 1


def test_nothing_is_recorded_when_off() -> None:
    records = HashRecords()
    records.enabled = False
    with lookup_client() as client:
        sent_by(client)
        HashRecordingLookupClient.from_existing(client, records=records)
        for number in range(10_000):
            client.lookup([1] * 16, str(number))
        assert len(records) == 0 and not records.texts and not records.labels


def test_the_first_lookup_counts() -> None:
    """After a preemption LMCache looks up prompt and generated tokens: the record stays the prompt's."""
    with lookup_client() as client:
        HashRecordingLookupClient.from_existing(client)
        client.lookup(list(range(32)), "r")
        client.lookup(list(range(64)), "r")
        assert client.get_cached_hashes("r") == own_chain(client, list(range(32)))


def test_skip_leaves_one_lookup_out() -> None:
    with lookup_client() as client:
        HashRecordingLookupClient.from_existing(client)
        records_of(client).skip("r")
        client.lookup(list(range(64)), "r")
        assert client.get_cached_hashes("r") is None


def test_labels_reach_the_ranks_and_keep_what_is_there() -> None:
    with lookup_client() as client:
        caught = sent_by(client)
        HashRecordingLookupClient.from_existing(client)
        records = records_of(client)
        records.default_labels = {TENANT_LABEL: "t"}
        records.labels["a"] = {TENANT_LABEL: "t", SESSION_LABEL: "s"}
        client.lookup(list(range(16)), "a", {"lmcache.skip_save": "x"})
        client.lookup(list(range(16)), "b")
        first, second = (msgspec.msgpack.decode(data, type=LookupRequestMsg).request_configs for data in caught)
        assert first == {"lmcache.skip_save": "x", TENANT_LABEL: "t", SESSION_LABEL: "s"}
        assert second == {TENANT_LABEL: "t"}
        assert not records.labels


def test_labels_do_not_change_keys() -> None:
    with lookup_client() as client:
        database = client.token_database
        (plain,) = [key for _, _, key in database.process_tokens(list(range(16)))]
        (labelled,) = [
            key for _, _, key in database.process_tokens(list(range(16)), request_configs={SESSION_LABEL: "s"})
        ]
        assert plain == labelled and hash(plain) == hash(labelled)


def test_the_sync_client_is_served_too() -> None:
    with lookup_client(enable_async_loading=False) as client:
        assert can_listen(innermost(client))
        upgrade(innermost(client), HashRecords())
        assert is_recording(client) and type(client).__name__ == "HashRecordingLookupClient"
        tokens = list(range(33))
        assert client.lookup(tokens, "r") == 0  # no rank answers within the timeout
        assert client.get_cached_hashes("r") == own_chain(client, tokens)


def test_a_replacing_subclass_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for LMCache-Ascend's client: a subclass put into the module, with a get_cached_hashes of its own."""

    class AscendStandIn(async_client.LMCacheAsyncLookupClient):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.looked_up: list[str] = []

        def lookup(self, token_ids: Any, lookup_id: str, request_configs: Any = None) -> Any:
            self.looked_up.append(lookup_id)
            return super().lookup(token_ids, lookup_id, request_configs)

        def get_cached_hashes(self, lookup_id: str) -> list[str] | None:
            raise AssertionError("the record of the subclass is not kept")

    monkeypatch.setattr(async_client, "LMCacheAsyncLookupClient", AscendStandIn)
    with lookup_client() as client:
        assert type(client) is AscendStandIn and can_listen(client)
        upgrade(client, HashRecords())
        client.lookup(list(range(16)), "r")
        assert client.looked_up == ["r"] and len(client.get_cached_hashes("r")) == 1


@pytest.mark.parametrize("settings", [{"hit_miss_ratio": 0.5}, {"enable_chunk_statistics": True}])
def test_abort_through_decorators(settings: dict[str, Any]) -> None:
    with lookup_client(**settings) as client:
        with pytest.raises(AttributeError):
            client.cancel_lookup("r")  # what ends an engine without the patch
        assert forward_cancel(client) == [type(client).__name__]
        client.cancel_lookup("r")
        assert innermost(client).aborted_lookups == {"r"}
        assert forward_cancel(client) == []


def test_abort_with_a_client_that_cannot_cancel() -> None:
    with lookup_client(enable_async_loading=False) as client:
        forward_cancel(client)
        client.cancel_lookup("r")


def test_the_bypass_client_is_served_by_computing_again(tmp_path: Path) -> None:
    """It borrows the engine's token database, through which other threads store: nobody listens there."""
    from lmcache.v1.lookup_client.lmcache_lookup_client_bypass import LMCacheBypassLookupClient

    from tests.support.lmcache_engine import lmcache_engine

    with lmcache_engine(tmp_path) as rig:
        client = LMCacheBypassLookupClient(rig.config, None, rig.engine)
        assert not can_listen(client)
        tokens = rig.tokens(3)
        wanted = list(rig.store(tokens))
        assert client.lookup(tokens, "r") == len(tokens)
        again = Recompute(client.token_database, HashTexts(), SimpleNamespace(skip_last_n_tokens=0))
        found = again(SimpleNamespace(prompt_token_ids=tokens))
        assert found is not None and [int(text, 16) for text in found] == wanted
        forward_cancel(client)
        client.cancel_lookup("r")
        rig.engine.lookup_unpin("r")


def test_lmcaches_bypass_and_mooncake_clients_answer_under_way_for_ever() -> None:
    """What docs/engine.md says of them. Where this fails, LMCache has mended it, and the page should say so."""
    from lmcache.v1.lookup_client.abstract_client import LookupClientInterface
    from lmcache.v1.lookup_client.lmcache_lookup_client_bypass import LMCacheBypassLookupClient
    from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient

    for kind in (LMCacheBypassLookupClient, MooncakeLookupClient):
        client = object.__new__(kind)
        assert not can_listen(client)
        assert kind.lookup_cache is LookupClientInterface.lookup_cache and client.lookup_cache("r") is None


EDGES = (0, 1, -1, 2**63 - 1, -(2**63), 0x0C16372E41EB4086)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 100])
def test_texts_are_lmcaches(count: int) -> None:
    texts = HashTexts()
    hashes = [EDGES[number % 6] if number < 6 else hash((number, count)) for number in range(count)]
    for _ in range(2):  # made, then remembered
        assert texts.of([(0, 16, value) for value in hashes]) == [f"{value:x}" for value in hashes]
    assert [int(text, 16) for text in texts.of([(0, 16, value) for value in hashes])] == hashes


def test_the_memo_is_bounded_and_lets_go_little_by_little() -> None:
    limit, peak = 10 * GROUP, 0
    texts = HashTexts(limit)
    often = [(0, 16, -value) for value in range(1, GROUP + 1)]
    first = texts.of(often)
    for turn in range(200):
        chunks = [(0, 16, turn * GROUP + value) for value in range(GROUP)]
        before = len(texts)
        assert texts.of(chunks) == [f"{chunk[2]:x}" for chunk in chunks]
        assert len(texts) >= before - GROUP, "one new group lets two go, never a generation at once"
        peak = max(peak, len(texts))
        if turn % 5 == 0:
            assert texts.of(often)[0] is first[0], "what is asked for again stays, in whichever generation it is"
    assert limit < peak <= 3 * limit


def test_the_decorator_chain_ends_on_a_loop() -> None:
    class Loop:
        actual_lookup_client: Any

    loop = Loop()
    loop.actual_lookup_client = loop
    assert innermost(loop) is loop
    assert sys.getrefcount(loop) < 20
