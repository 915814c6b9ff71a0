# SPDX-License-Identifier: Apache-2.0
"""The agent-side memory map: which chunk chains a session, a topic or an intent will read again, and what to ask of
the engines' caches because of it.

    async with connect(url) as kv, MemoryMap(kv, store=Store("memory.db"), agent="me") as memory:
        await memory.note("s1", "The invoice total is off by a cent", topic="billing bug", request_id=answer.id)
        await memory.tool_call_started("s1", "search", expected_ms=4000)
        ...
        warmed = await memory.continue_with("let's go on with the billing bug", in_ms=1500)
"""

from __future__ import annotations

from semkv.consumers.memory.chains import Chain, diff_deleted
from semkv.consumers.memory.embeddings import EmbeddingError, LexicalEmbedding, LocalEmbedding, OpenAIEmbedding
from semkv.consumers.memory.explain import explain
from semkv.consumers.memory.map import Continuation, MemoryMap
from semkv.consumers.memory.policy import Budget, Policy, Timing
from semkv.consumers.memory.store import Decision, Store, StoreError

__all__ = [
    "Budget",
    "Chain",
    "Continuation",
    "Decision",
    "EmbeddingError",
    "LexicalEmbedding",
    "LocalEmbedding",
    "MemoryMap",
    "OpenAIEmbedding",
    "Policy",
    "Store",
    "StoreError",
    "Timing",
    "diff_deleted",
    "explain",
]
