# SPDX-License-Identifier: Apache-2.0
"""The forest of a rank is told of each lookup that a real LMCache engine serves, and of each end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("lmcache")

from semkv.engine_hooks.forest_feed import ForestFeed
from semkv.engine_hooks.lookup_client import CHUNKS_LABEL, SESSION_LABEL, TENANT_LABEL
from tests.support.lmcache_engine import lmcache_engine


class Told:
    """Keeps what a forest would be told."""

    def __init__(self) -> None:
        self.lookups: list[tuple[str | None, str | None, tuple[int, ...], str]] = []
        self.tails: list[int | None] = []
        self.ended: list[str] = []
        self.fail = False

    def record_lookup(
        self,
        tenant: str | None,
        session: str | None,
        hashes: Sequence[int],
        request_id: str,
        running: bool = True,
        *,
        tail: int | None = None,
    ) -> None:
        if self.fail:
            raise RuntimeError("on purpose")
        self.lookups.append((tenant, session, tuple(hashes), request_id))
        self.tails.append(tail)

    def finished(self, request_ids: Iterable[str]) -> None:
        self.ended += sorted(request_ids)


class Named:
    """Keeps what an attribution would be told."""

    def __init__(self) -> None:
        self.lookups: list[tuple[int, ...]] = []

    def looked_up(self, request_id: str, hashes: Sequence[int]) -> None:
        self.lookups.append(tuple(hashes))

    def finished(self, request_ids: Iterable[str]) -> None:
        pass


def test_lookups_and_ends_reach_the_forest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    with lmcache_engine(tmp_path) as rig:
        named = Named()
        feed = ForestFeed(rig.engine, told, rig.chunk_size, hits=named)
        tokens = rig.tokens(4)
        chain = rig.store(tokens)
        request = rig.lookup(tokens, **{SESSION_LABEL: "s", TENANT_LABEL: "t"})
        assert told.lookups == [("t", "s", chain, request)]
        assert rig.hit_tokens(request) == len(tokens), "LMCache's own answer is as before"
        rig.retrieve(request, tokens)

        # looked up again after a preemption: only the prompt's chunks count
        again = rig.lookup(tokens, **{CHUNKS_LABEL: "2"})
        assert told.lookups[-1] == (None, None, chain[:2], again)
        rig.retrieve(again, tokens)

        # a tail chunk is no whole chunk, and the sync lookup counts as well
        offsets = [rig.chunk_size] * 3 + [1]
        rig.engine.lookup(hashes=list(chain), offsets=offsets, lookup_id="sync", pin=False, request_configs=None)
        assert told.lookups[-1] == (None, None, chain[:3], "sync")
        assert told.tails == [None, None, chain[3]]
        assert named.lookups == [chain, chain[:2], chain], "whoever attributes hits is told of the tail as well"
        labels = {CHUNKS_LABEL: "2"}
        rig.engine.lookup(hashes=list(chain), offsets=offsets, lookup_id="sync", pin=False, request_configs=labels)
        assert (told.lookups[-1][2], told.tails[-1]) == (chain[:2], None), "that one ends with generated tokens"

        # lookups that are nobody's request are not told
        count = len(told.lookups)
        rig.engine.lookup(tokens)
        assert len(told.lookups) == count

        feed.finished({request, again})
        assert told.ended == sorted([request, again])

        told.fail = True
        for _ in range(2):
            rig.retrieve(rig.lookup(tokens), tokens)
        lines = [record for record in caplog.records if "forest could not be told" in record.getMessage()]
        assert len(lines) == 1, "said once, and LMCache goes on"

        ForestFeed(rig.engine, Told(), rig.chunk_size)
        assert rig.engine.lookup.__wrapped__ is not None
