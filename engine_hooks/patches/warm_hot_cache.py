# SPDX-License-Identifier: Apache-2.0
"""What a lookup loaded from disk or a remote store is registered in the hot cache.

LMCache 0.4.3/0.4.4 throws the loaded objects away after use, so that every later hit reads the disk again. Only objects
that were read whole get here; transfer proxies are left out. The whole chain is then touched in reverse order, so
that a prefix is younger than what follows it.

Threads: the storage loop; holds `cpu_lock` without I/O.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")


def register(backend: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Put objects into the hot cache and make the chain's head its youngest entry."""
    for key, memory_obj in pairs:
        if memory_obj.is_valid() and not getattr(memory_obj, "is_proxy", False):
            backend.submit_put_task(key, memory_obj)
    with backend.cpu_lock:
        for key, _ in reversed(pairs):
            if key in backend.hot_cache:
                backend.cache_policy.update_on_hit(key, backend.hot_cache)


def _make(current: AnyFunction) -> AnyFunction:
    @functools.wraps(current)
    def prefetch_all_done_callback(self: Any, task: Any, *args: Any, **kwargs: Any) -> None:
        backend = self.local_cpu_backend
        if getattr(backend, "use_hot", False) and not task.cancelled() and task.exception() is None:
            try:
                register(backend, [pair for tier in task.result() for pair in tier])
            except Exception as error:  # the answer to the scheduler must go out whatever happens here
                logger.error("loaded chunks are not registered: %s: %s", type(error).__name__, error)
        current(self, task, *args, **kwargs)

    return prefetch_all_done_callback


PATCH = Patch(
    name="warm_hot_cache",
    reason="chunks loaded from disk by a lookup are not kept in DDR",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.storage_manager:StorageManager.prefetch_all_done_callback",
            _make,
            frozenset({"ac3352bb651f0f3d"}),
        ),
    ),
    requires=("disk_load", "selective_unpin", "completion"),
)
