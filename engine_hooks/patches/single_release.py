# SPDX-License-Identifier: Apache-2.0
"""A retrieve releases nothing; only the clean-up of its lookup does, once for each object.

LMCache 0.4.3/0.4.4 releases the loaded objects that a retrieve skipped (because vLLM's own prefix cache had those
tokens) and then releases every loaded object of the lookup again. The second release frees chunks that are still in
the hot cache: later lookups report them, and reading them dies or returns another chunk's bytes.

Threads: runs on vLLM's forward thread, as the function it replaces.
"""

from __future__ import annotations

import logging
from typing import Any

from semkv.engine_hooks.patches._mechanism import AnyFunction, Patch, Replacement

logger = logging.getLogger("semkv.engine_hooks.patches")


def _make(_current: AnyFunction) -> AnyFunction:
    from lmcache.v1.event_manager import EventType

    def _async_process_tokens_internal(
        self: Any, tokens: Any, mask: Any, ret_mask: Any, **kwargs: Any
    ) -> tuple[list[Any], int]:
        """The leading loaded chunks of this request that the mask asks for."""
        request = kwargs["req_id"]
        try:
            loaded = self.event_manager.get_event_future(EventType.LOADING, request).result()
        except Exception as error:
            logger.error("request %s has no loaded chunks: %s", request, error)
            return [], 0
        by_key = {key: memory_obj for tier in loaded for key, memory_obj in tier}
        chunks: list[Any] = []
        size = 0
        for start, end, key in self.token_database.process_tokens(
            tokens=tokens, mask=mask, request_configs=kwargs.get("request_configs")
        ):
            memory_obj = by_key.get(key)
            if memory_obj is None:
                break
            chunks.append((key, memory_obj, start, end))
            size += memory_obj.get_size()
            ret_mask[start:end] = True
        return chunks, size

    return _async_process_tokens_internal


PATCH = Patch(
    name="single_release",
    reason="objects that a retrieve skips are released twice and freed inside the hot cache",
    replacements=(
        Replacement(
            "lmcache.v1.cache_engine:LMCacheEngine._async_process_tokens_internal",
            _make,
            frozenset({"3e97f45f7d141614"}),
        ),
    ),
)
