# SPDX-License-Identifier: Apache-2.0
"""What became of prefetched chunks, told by object identity on a real engine."""

from __future__ import annotations

import pytest

from semkv.bus.status import Tier
from semkv.consumers.storage import Control, LMCacheStorage, attribution
from semkv.consumers.storage.attribution import Attribution, Outcome
from semkv.consumers.storage.prefetch import Loaded
from tests.consumers.storage.nobody import Nobody
from tests.consumers.storage.reads import around_reads
from tests.support.lmcache_engine import Rig


class Scene:
    """An engine whose hits are attributed, with four chunks on disk."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: list[Outcome] = []
        self.links: list[tuple[str, str]] = []
        self.now = 0.0
        self.attribution = Attribution(
            self.told.append, on_useful=lambda *pair: self.links.append(pair), clock=lambda: self.now
        )
        self.attribution.watch_device(rig.engine)
        self.storage = LMCacheStorage(rig.engine, Nobody(), watch=self.attribution)
        self.tokens = rig.tokens(4)
        self.hashes = rig.store(self.tokens)
        rig.drop_from_ddr(self.tokens)

    def prefetch(self, command: str = "c1") -> None:
        self.storage.prefetch(self.hashes, control=Control(command_id=command))

    def asks_during_the_first_read(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a request name the chunks while the first of them is on its way."""
        asked: list[str] = []

        def ask(path: str) -> None:
            if not asked:
                asked.append(path)
                self.attribution.looked_up(name, (*self.hashes, 7))  # no prefetch is about to load the last one

        around_reads(monkeypatch, ask)

    def request(self, name: str, skip: int = 0) -> None:
        self.attribution.looked_up(name, self.hashes)
        self.rig.lookup(self.tokens, request=name)
        self.rig.retrieve(name, self.tokens, skip_chunks=skip)
        self.attribution.finished([name])
        self.attribution.sweep()


@pytest.fixture
def scene(rig: Rig) -> Scene:
    """The engine and its attribution."""
    return Scene(rig)


def counted(outcome: Outcome) -> tuple[int, int, int, int]:
    return outcome.useful, outcome.redundant, outcome.late, outcome.wasted


def test_what_a_request_loads_is_useful_and_linked_to_it(scene: Scene) -> None:
    scene.prefetch()
    assert scene.told == []
    scene.now += 2.0
    scene.request("r1")
    assert [counted(outcome) for outcome in scene.told] == [(4, 0, 0, 0)]
    assert (scene.told[0].lead_ms, scene.told[0].bytes) == (2000.0, 4 * scene.rig.chunk_bytes)
    assert scene.links == [("c1", "r1")]
    scene.request("r2")
    assert len(scene.told) == 1, "told once"


def test_what_the_engine_held_already_is_redundant(scene: Scene) -> None:
    scene.prefetch()
    scene.request("r1", skip=3)
    assert [counted(outcome) for outcome in scene.told] == [(1, 3, 0, 0)]


def test_the_shortest_time_from_load_to_use_is_told(scene: Scene) -> None:
    scene.prefetch()
    half = scene.tokens[: len(scene.tokens) // 2]
    for name, tokens, seconds in (("r1", half, 2.0), ("r2", scene.tokens, 3.0)):
        scene.now += seconds
        scene.rig.lookup(tokens, request=name)
        scene.rig.retrieve(name, tokens)
    scene.attribution.sweep()
    assert [(counted(outcome), outcome.lead_ms) for outcome in scene.told] == [((4, 0, 0, 0), 2000.0)]
    assert scene.links == [("c1", "r1"), ("c1", "r2")]


def test_an_object_for_tokens_that_the_engine_held_is_not_useful(scene: Scene) -> None:
    """The device connector may be handed such an object too, together with how many tokens the engine holds."""
    scene.prefetch()
    size = scene.rig.chunk_size
    objects = [scene.rig.cpu.hot_cache[key] for key in scene.rig.keys(scene.tokens)]
    scene.attribution.looked_up("r1", scene.hashes)
    ends = [size * (number + 1) for number in range(len(objects))]
    scene.attribution.received(objects, ends, {"vllm_cached_tokens": 3 * size, "req_id": "r1"})
    scene.attribution.finished(["r1"])
    scene.attribution.sweep()
    assert [counted(outcome) for outcome in scene.told] == [(1, 3, 0, 0)]


def test_what_goes_before_anybody_comes_is_wasted(scene: Scene) -> None:
    scene.prefetch()
    scene.storage.evict(scene.hashes[3:])
    scene.attribution.sweep()
    scene.request("r1")
    assert [counted(outcome) for outcome in scene.told] == [(3, 0, 0, 1)]


def test_what_nobody_comes_for_in_time_is_wasted(scene: Scene) -> None:
    scene.prefetch()
    scene.now += 600.0
    scene.attribution.sweep()
    assert [counted(outcome) for outcome in scene.told] == [(0, 0, 0, 4)]


def test_what_is_loaded_again_was_wasted_the_first_time(scene: Scene) -> None:
    scene.prefetch()
    first = list(scene.rig.cpu.hot_cache.values())  # alive, so that their addresses are not used again
    scene.storage.evict(scene.hashes, tiers=(Tier.CPU,))
    scene.prefetch("c2")
    assert [(outcome.command_id, *counted(outcome)) for outcome in scene.told] == [("c1", 0, 0, 0, 4)]
    scene.request("r1")
    assert [(outcome.command_id, *counted(outcome)) for outcome in scene.told[1:]] == [("c2", 4, 0, 0, 0)]
    assert len(first) == 4


def test_what_is_used_while_the_rest_is_loading_ends_nothing(scene: Scene) -> None:
    scene.storage.prefetch(scene.hashes)  # nameless, so that these objects are nobody's so far
    size = scene.rig.chunk_size
    scene.attribution.begins("c1", scene.hashes)
    for chunk_hash, key in zip(scene.hashes, scene.rig.keys(scene.tokens), strict=True):
        memory_obj = scene.rig.cpu.hot_cache[key]
        scene.attribution.loaded(Loaded("c1", chunk_hash, memory_obj, scene.rig.chunk_bytes))
        scene.attribution.received([memory_obj], [size], {"req_id": "r1"})
        scene.attribution.sweep()
        assert scene.told == []
    scene.attribution.ends("c1")
    assert [counted(outcome) for outcome in scene.told] == [(4, 0, 0, 0)]


def test_a_prefetch_that_loads_nothing_is_told_at_its_end(scene: Scene) -> None:
    scene.prefetch()
    scene.prefetch("c2")
    assert [(outcome.command_id, *counted(outcome)) for outcome in scene.told] == [("c2", 0, 0, 0, 0)]


def test_the_same_chunk_loaded_by_somebody_else_is_not_the_commands(scene: Scene) -> None:
    scene.prefetch()
    scene.rig.drop_from_ddr(scene.tokens)
    scene.request("r1")
    assert [counted(outcome)[0] for outcome in scene.told] == [0]


class Thing:
    """As little of a memory object as attribution looks at."""

    def __init__(self) -> None:
        self.valid = True

    def is_valid(self) -> bool:
        return self.valid


def test_an_object_whose_memory_is_freed_is_wasted_whoever_still_knows_it() -> None:
    told: list[Outcome] = []
    attribution, loaded = Attribution(told.append), Thing()
    attribution.begins("c1", (1,))
    attribution.loaded(Loaded("c1", 1, loaded, 10))
    attribution.ends("c1")
    attribution.sweep()
    assert told == []
    loaded.valid = False
    attribution.sweep()
    assert [counted(outcome) for outcome in told] == [(0, 0, 0, 1)]


def test_another_object_at_the_same_address_is_not_the_one_that_was_loaded() -> None:
    told: list[Outcome] = []
    attribution = Attribution(told.append)
    loaded = Thing()
    attribution.begins("c1", (1,))
    attribution.loaded(Loaded("c1", 1, loaded, 10))
    attribution.ends("c1")
    address = id(loaded)
    del loaded
    others = [Thing()]
    while id(others[-1]) != address and len(others) < 100_000:
        others.append(Thing())
    assert id(others[-1]) == address
    attribution.received(others[-1:], [16], {"req_id": "r1"})
    attribution.sweep()
    assert [counted(outcome) for outcome in told] == [(0, 0, 0, 1)]


def test_a_request_that_comes_before_the_load_makes_it_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.asks_during_the_first_read("r1", monkeypatch)
    scene.prefetch()
    scene.rig.lookup(scene.tokens, request="r1")
    scene.rig.retrieve("r1", scene.tokens)
    scene.attribution.finished(["r1"])
    scene.attribution.sweep()
    assert [counted(outcome) for outcome in scene.told] == [(4, 0, 4, 0)]


def test_what_was_not_there_when_a_request_looked_is_not_redundant(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request looked before the load and computed the tokens itself: nobody has used the chunks so far."""
    scene.asks_during_the_first_read("r1", monkeypatch)
    scene.prefetch()
    scene.attribution.finished(["r1"])
    scene.attribution.sweep()
    assert scene.told == []
    scene.request("r2")
    assert [counted(outcome) for outcome in scene.told] == [(4, 0, 4, 0)]


def test_an_address_that_is_used_again_settles_what_was_there_before(scene: Scene) -> None:
    """Objects are told apart by address while they live: a new one at an old address ends the old one's story."""
    memory_obj = next(iter(scene.rig.cpu.hot_cache.values()), None) or scene.rig.pin_pool()[0]
    for command, chunk_hash in (("old", 1), ("new", 2)):
        scene.attribution.begins(command, (chunk_hash,))
        scene.attribution.loaded(Loaded(command, chunk_hash, memory_obj, 10))
        scene.attribution.ends(command)
    assert [(outcome.command_id, counted(outcome)) for outcome in scene.told] == [("old", (0, 0, 0, 1))]


def test_the_engines_threads_never_run_a_callback(scene: Scene) -> None:
    scene.prefetch()
    scene.attribution.looked_up("r1", scene.hashes)
    scene.rig.lookup(scene.tokens, request="r1")
    scene.rig.retrieve("r1", scene.tokens)
    scene.attribution.finished(["r1"])
    assert scene.told == []
    scene.attribution.sweep()
    assert len(scene.told) == 1


def test_requests_that_never_end_are_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "REQUESTS", 3)
    scene.prefetch()
    for number in range(10):
        scene.attribution.looked_up(f"r{number}", scene.hashes)
    scene.attribution.finished([f"r{number}" for number in range(7)])
    scene.attribution.sweep()
    assert scene.told == []
    scene.attribution.finished(["r9"])
    scene.attribution.sweep()
    assert [counted(outcome) for outcome in scene.told] == [(0, 4, 0, 0)]


def test_what_was_in_ddr_already_is_not_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four chunks are hot before the prefetch begins: a request that comes meanwhile lacks the others only."""
    scene.rig.retrieve(scene.rig.lookup(scene.tokens[: len(scene.tokens) // 2]), scene.tokens[: len(scene.tokens) // 2])
    scene.rig.wait_for(lambda: len(scene.rig.cpu.hot_cache) == 2, "the first two chunks")
    scene.asks_during_the_first_read("r1", monkeypatch)
    scene.prefetch()
    scene.request("r2")
    assert [counted(outcome) for outcome in scene.told] == [(2, 0, 2, 0)]


def test_a_bug_in_whoever_is_told_costs_the_prefetch_nothing(rig: Rig) -> None:
    def broken(_: Outcome) -> None:
        raise RuntimeError("on purpose")

    storage = LMCacheStorage(rig.engine, Nobody(), watch=Attribution(broken))
    result = storage.prefetch((1, 2), control=Control(command_id="c1"))
    assert result.counts == {"missing": 1, "unreachable": 1}
    rig.check()


def test_a_bug_in_what_is_linked_costs_the_request_nothing(rig: Rig) -> None:
    asked: list[str] = []

    def broken(_: str, request_id: str) -> None:
        asked.append(request_id)
        raise RuntimeError("on purpose")

    watch = Attribution(lambda _: None, on_useful=broken)
    watch.watch_device(rig.engine)
    storage = LMCacheStorage(rig.engine, Nobody(), watch=watch)
    tokens = rig.tokens(2)
    hashes = rig.store(tokens)
    rig.drop_from_ddr(tokens)
    storage.prefetch(hashes, control=Control(command_id="c1"))
    rig.lookup(tokens, request="r1")
    assert rig.retrieve("r1", tokens) == len(tokens)
    assert asked == ["r1"]
    rig.check()
