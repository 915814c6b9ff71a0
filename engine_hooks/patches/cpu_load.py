# SPDX-License-Identifier: Apache-2.0
"""Taking chunks from the hot cache stops at one that has gone instead of raising with references taken.

LMCache 0.4.3/0.4.4 raises KeyError when a chunk goes between the lookup and the load: the references taken before it
are lost and the request never gets its answer. Chunks whose memory is freed already are not handed out either.

Threads: the storage loop; holds `cpu_lock` without I/O.
"""

from __future__ import annotations

from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement


def _make(_current: AnyFunction) -> AnyFunction:
    async def batched_get_non_blocking(
        self: Any, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """References to the leading run of `keys` in the hot cache."""
        taken: list[Any] = []
        with self.cpu_lock:
            for key in keys:
                memory_obj = self.hot_cache.get(key)
                if memory_obj is None or not memory_obj.is_valid():
                    break
                memory_obj.ref_count_up()
                taken.append(memory_obj)
        return taken

    return batched_get_non_blocking


PATCH = Patch(
    name="cpu_load",
    reason="a chunk that goes between lookup and load raises and loses the references taken so far",
    replacements=(
        Replacement(
            "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend.batched_get_non_blocking",
            _make,
            frozenset({"470cd76f4f44df27"}),
        ),
    ),
)
