# SPDX-License-Identifier: Apache-2.0
"""A prefetch and live requests on one real engine: the live load goes first, and neither can hold the other up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from semkv.bus.status import ChunkStatus, State
from semkv.consumers.storage import prefetch
from semkv.consumers.storage.lmcache import LMCacheStorage
from semkv.consumers.storage.ops import Control, OpResult
from tests.consumers.storage.reads import around_reads
from tests.support.lmcache_engine import Rig


class Loads:
    """Every read of a chunk's file, in order; those of a live request wait for `gate`."""

    def __init__(self, rig: Rig, live: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        paths = {rig.disk.dict[key].path for key in rig.keys(live)}
        self.order: list[str] = []
        self.live_began, self.gate = threading.Event(), threading.Event()

        def note(path: str) -> None:
            if path in paths:
                self.live_began.set()
                assert self.gate.wait(60)
                self.order.append("live")
            else:
                self.order.append("prefetch")

        around_reads(monkeypatch, note)


class Polls:
    """Counts how often a prefetch looked whether a live load is going on."""

    def __init__(self, storage: LMCacheStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        real = storage._backends.live_loading
        self.seen = 0

        def live_loading() -> bool:
            self.seen += 1
            return real()

        monkeypatch.setattr(storage._backends, "live_loading", live_loading)


@contextmanager
def running(work: Callable[[], OpResult]) -> Iterator[list[OpResult]]:
    results: list[OpResult] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    yield results
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def live(rig: Rig) -> list[int]:
    """A prompt that only the disk holds."""
    tokens = rig.tokens(3, seed=1)
    rig.store(tokens)
    rig.drop_from_ddr(tokens)
    return tokens


@pytest.fixture
def wanted(rig: Rig) -> tuple[int, ...]:
    """The chain to prefetch, from the disk too."""
    tokens = rig.tokens(4, seed=2)
    hashes = rig.store(tokens)
    rig.drop_from_ddr(tokens)
    return hashes


def test_a_prefetch_lets_a_live_load_finish_first(
    rig: Rig, storage: LMCacheStorage, live: list[int], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, polls = Loads(rig, live, monkeypatch), Polls(storage, monkeypatch)
    monkeypatch.setattr(prefetch, "_YIELD_S", 60.0)  # the live load ends long before
    request = rig.lookup(live, wait=False)
    assert loads.live_began.wait(20)
    with running(lambda: storage.prefetch(wanted)) as results:
        rig.wait_for(lambda: polls.seen >= 20 or "prefetch" in loads.order, "the prefetch to look around")
        loads.gate.set()
    assert loads.order == ["live"] * 3 + ["prefetch"] * 4
    assert results[0].state is State.SUCCEEDED
    rig.wait_for(lambda: request in rig.replies.tokens, "the answer to the lookup")
    assert rig.retrieve(request, live) == 3 * rig.chunk_size
    rig.check()


def test_a_live_load_that_never_ends_does_not_hold_a_prefetch_for_ever(
    rig: Rig, storage: LMCacheStorage, live: list[int], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(rig, live, monkeypatch)
    request = rig.lookup(live, wait=False)
    assert loads.live_began.wait(20)
    assert storage.prefetch(wanted).state is State.SUCCEEDED, "it waits 50 ms a chunk, not longer"
    assert loads.order == ["prefetch"] * 4
    loads.gate.set()
    rig.wait_for(lambda: request in rig.replies.tokens, "the answer to the lookup")
    rig.retrieve(request, live)
    rig.check()


def test_cancel_and_expiry_end_the_waiting(
    rig: Rig, storage: LMCacheStorage, live: list[int], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, polls = Loads(rig, live, monkeypatch), Polls(storage, monkeypatch)
    monkeypatch.setattr(prefetch, "_YIELD_S", 60.0)
    request = rig.lookup(live, wait=False)
    assert loads.live_began.wait(20)
    control = Control()
    with running(lambda: storage.prefetch(wanted, control=control)) as results:
        rig.wait_for(lambda: polls.seen >= 20, "the prefetch to look around")
        control.cancel()
    assert results[0].state is State.CANCELLED
    assert results[0].chunk_status == (ChunkStatus.NOT_TRIED,) * 4
    assert loads.order == []
    loads.gate.set()
    rig.wait_for(lambda: request in rig.replies.tokens, "the answer to the lookup")
    rig.retrieve(request, live)
    rig.check()


def test_a_request_is_served_while_a_prefetch_reads(
    rig: Rig, storage: LMCacheStorage, live: list[int], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, gate = threading.Event(), threading.Event()
    slow = {rig.disk.dict[key].path for key in rig.keys(rig.tokens(4, seed=2))}

    def hold(path: str) -> None:
        if path in slow:
            reading.set()
            assert gate.wait(60)

    around_reads(monkeypatch, hold)
    with running(lambda: storage.prefetch(wanted)) as results:
        assert reading.wait(20)
        assert rig.serve(live) == 3 * rig.chunk_size, "a prefetch that reads for ever holds nothing a request needs"
        gate.set()
    assert results[0].state is State.SUCCEEDED
    rig.check()
