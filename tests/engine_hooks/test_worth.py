# SPDX-License-Identifier: Apache-2.0
"""What prefetches were worth, on a real LMCache engine with the hooks that a worker has: who speaks, what links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from semkv.bus.messages import Outcome
from semkv.bus.status import Role
from semkv.bus.tracing import TraceContext
from semkv.cli.traces.store import read_spans
from semkv.consumers.rank import RankIdentity
from semkv.consumers.storage import Control, LMCacheStorage, PrefixForest
from semkv.engine_hooks.engine_spans import engine_spans
from semkv.engine_hooks.forest_feed import ForestFeed
from semkv.engine_hooks.patches import apply_all
from semkv.engine_hooks.worth import Worth
from tests.contracts.samples import DOMAIN
from tests.engine_hooks.test_forest_feed import Told
from tests.support.lmcache_engine import lmcache_engine

COMMAND = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_speaks_and_every_ranks_hit_links(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_all()
    file = tmp_path / "trace.json"
    monkeypatch.setenv("SEMKV_TRACE_FILE", str(file))
    told: list[tuple[Outcome, TraceContext | None]] = []
    with lmcache_engine(tmp_path / "e") as rig:
        spans = engine_spans(rig.engine, {"kv.rank": rank})
        assert spans is not None
        worth = Worth(RankIdentity("engine-0", rank, 2, Role.STORAGE, DOMAIN), spans)
        worth.attribution.watch_device(rig.engine)
        forest = PrefixForest()
        feed = ForestFeed(rig.engine, forest, rig.chunk_size, spans.follow, worth.attribution)
        storage = LMCacheStorage(rig.engine, forest, watch=worth.attribution)
        worth.start(lambda *pair: told.append(pair), {"acme.c1": COMMAND}.get)
        tokens = rig.tokens(3)
        chain = rig.store(tokens)
        rig.drop_from_ddr(tokens)
        forest.record_lookup("acme", None, chain, "before", running=False)
        result = storage.prefetch(chain, control=Control(command_id="acme.c1"), tenant="acme")
        assert result.counts == {"loaded": 3}
        request = rig.lookup(tokens)
        assert rig.retrieve(request, tokens) == len(tokens)
        feed.finished([request])
        worth.close()
        spans.close()
    (hit,) = [span for span in read_spans(file) if span.name == "kv.retrieve"]
    assert hit.links == ((COMMAND.trace_id, COMMAND.span_id),)
    if rank:
        assert told == []
        return
    ((outcome, context),) = told
    assert (outcome.tenant, outcome.command_id, outcome.instance, outcome.rank) == ("acme", "c1", "engine-0", 0)
    assert (outcome.useful, outcome.redundant, outcome.late, outcome.wasted) == (3, 0, 0, 0)
    assert outcome.bytes == 3 * rig.chunk_bytes and outcome.domain == DOMAIN.fingerprint
    assert context == COMMAND


def test_a_bug_in_attribution_costs_the_forest_nothing(tmp_path: Path) -> None:
    class Broken:
        def looked_up(self, *_: Any) -> None:
            raise RuntimeError

        finished = looked_up

    with lmcache_engine(tmp_path) as rig:
        forest = Told()
        feed = ForestFeed(rig.engine, forest, rig.chunk_size, None, Broken())
        tokens = rig.tokens(2)
        rig.store(tokens)
        request = rig.lookup(tokens)
        rig.retrieve(request, tokens)
        feed.finished([request])
        assert [call[-1] for call in forest.lookups] == [request] == forest.ended
