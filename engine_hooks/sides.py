# SPDX-License-Identifier: Apache-2.0
"""Builds the side of semkv that a connector of a given role gets: a SchedulerSide or a WorkerSide.

Called once, right after LMCache's adapter was built, on the process's main thread. Errors pass to the caller, which
leaves the connector unhooked; nothing has been changed by then that would not be harmless alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from semkv.bus.settings import BusSettings
from semkv.bus.status import HashesStatus
from semkv.engine_hooks import chain_hash, hash_algorithm, identity, lookup_client, refusals, request_ids
from semkv.engine_hooks.agreement import Agreement
from semkv.engine_hooks.direct.serve import serve_scheduler
from semkv.engine_hooks.event_loop import EventLoop
from semkv.engine_hooks.no_events import NoEvents
from semkv.engine_hooks.patches import lookup_forward
from semkv.engine_hooks.publisher import EventPublisher
from semkv.engine_hooks.recompute import Recompute
from semkv.engine_hooks.scheduler_side import SchedulerSide
from semkv.engine_hooks.settings import HookSettings, on_the_bus

_log = logging.getLogger("semkv.engine_hooks")


def make_side(impl: Any, vllm_config: Any, role: Any) -> Any:
    """The side for LMCache's adapter `impl`; None where LMCache itself failed to start."""
    if role.name != "SCHEDULER":
        from semkv.engine_hooks.worker_start import WorkerSide

        engine = impl.lmcache_engine
        use_configured_hash(getattr(engine, "token_database", None), config=impl.config, vllm_config=vllm_config)
        return WorkerSide(impl, vllm_config)
    if impl.lookup_client is None:
        _log.error("semkv: not hooked: LMCache's scheduler side did not start (its own message says why)")
        return None
    return _scheduler_side(impl, vllm_config)


def engine_status(config: Any) -> tuple[HashesStatus, str] | None:
    """What holds for every request of an engine whose hashes cannot be used."""
    reason = refusals.engine_reason(config)
    if reason is not None:
        return HashesStatus.UNSUPPORTED, reason
    reason = refusals.unstable_reason(hash_algorithm.chosen(config))
    return None if reason is None else (HashesStatus.UNSTABLE, reason)


def use_configured_hash(database: Any, *, config: Any, vllm_config: Any) -> None:
    """Give a token database of this process the blake3 chain if the configuration asks for it."""
    if database is None or hash_algorithm.chosen(config) != hash_algorithm.BLAKE3:
        return
    if refusals.engine_reason(config) is None:
        model = vllm_config.model_config
        chain_hash.install(
            database, config, model=str(model.model), revision=str(getattr(model, "revision", None) or "")
        )


def _adopt(
    client: Any, *, settings: HookSettings, record: bool, use_chain: Callable[[Any], None]
) -> lookup_client.HashRecords | None:
    """Mend and upgrade a lookup client that LMCache has just built."""
    lookup_forward.forward_cancel(client)
    inner = lookup_client.innermost(client)
    if not lookup_client.is_recording(inner):
        use_chain(getattr(inner, "token_database", None))
    if not record or not lookup_client.can_listen(inner):
        return None
    records = lookup_client.HashRecords(settings.records)
    records.default_labels = {lookup_client.TENANT_LABEL: settings.tenant}
    lookup_client.upgrade(inner, records)
    return lookup_client.records_of(inner)


def _scheduler_side(impl: Any, vllm_config: Any) -> SchedulerSide:
    settings = HookSettings.from_env()
    config, metadata = impl.config, impl.lmcache_engine_metadata
    client = impl.lookup_client
    inner = lookup_client.innermost(client)
    use_chain = functools.partial(use_configured_hash, config=config, vllm_config=vllm_config)
    use_chain(getattr(inner, "token_database", None))
    database = getattr(inner, "token_database", None)
    status = engine_status(config)
    if status is not None:
        _log.error("semkv: finished events carry no chunk hashes (%s): %s", status[0], status[1])

    domain = agreement = None
    if database is not None and (status is None or status[0] is HashesStatus.UNSTABLE):
        domain = identity.hash_domain(vllm_config, config, metadata, database, layout=identity.layout(vllm_config))
    if domain is not None and on_the_bus():  # where ranks announce their domains
        agreement = Agreement(domain, int(metadata.world_size))
    recompute = None
    if status is None and database is not None and not lookup_client.can_listen(inner):
        recompute = Recompute(database, lookup_client.HashTexts(), impl)
    instance = identity.instance_name(vllm_config)
    named = domain.fingerprint if domain is not None else "none"
    publisher: EventPublisher | NoEvents = NoEvents()
    if on_the_bus():
        loop = EventLoop(
            BusSettings.from_env(),
            instance=instance,
            domain=named,
            chunk_size=int(config.chunk_size),
            agreement=agreement,
            suffixed=request_ids.randomised(),
        )
        publisher = EventPublisher(loop.run, ring=settings.ring, tenant=settings.tenant)
    side = SchedulerSide(
        settings,
        impl,
        publisher,
        agreement=agreement,
        engine_status=status,
        recompute=recompute,
        adopt=functools.partial(_adopt, settings=settings, record=status is None, use_chain=use_chain),
    )
    _ = side.records  # upgrades the client now, not at the first request
    publisher.start()
    serve_scheduler(config, int(metadata.world_size))
    _log.info(
        "semkv: hooked the scheduler of instance %s (hash domain %s, lookup client %s)",
        instance,
        named,
        type(lookup_client.innermost(client)).__name__,
    )
    return side
