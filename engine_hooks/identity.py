# SPDX-License-Identifier: Apache-2.0
"""Who this process is on the bus: the engine's instance name, and the hash domain of its chunk hashes.

Both are made the same way in the scheduler and in every worker from what vLLM and LMCache were configured with, so that
they agree exactly when their hashes mean the same bytes. Called once per process, when its connector is built.
"""

from __future__ import annotations

import os
from typing import Any

from semkv.bus.domain import HashDomain


def instance_name(vllm_config: Any) -> str:
    """SEMKV_INSTANCE, else the engine id that vLLM gave the KV transfer (with its `_dpN`)."""
    named = os.environ.get("SEMKV_INSTANCE", "").strip()
    parallel = vllm_config.parallel_config
    if named:
        # One name for the deployment, several engines in it: data parallel engines must not answer as one.
        ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
        return f"{named}_dp{getattr(parallel, 'data_parallel_rank', 0)}" if ranks > 1 else named
    transfer = vllm_config.kv_transfer_config
    return str(transfer.engine_id)


def probe(token_database: Any, chunk_size: int) -> int:
    """The last hash that this process's token database gives for tokens 0 … 2*chunk_size-1.

    It tells apart what no configuration field shows: the algorithm, its root value, the tuple that is hashed and the
    Python that hashes it.
    """
    last = 0
    for _start, _end, value in token_database.process_tokens(list(range(2 * chunk_size)), make_key=False):
        last = value
    if not isinstance(last, int):
        raise TypeError(f"the token database gives {type(last).__name__} as a chunk hash, 64-bit integers are needed")
    return last


def hash_domain(vllm_config: Any, config: Any, metadata: Any, token_database: Any, *, layout: str) -> HashDomain:
    """The hash domain of this process's chunk hashes."""
    model = vllm_config.model_config
    return HashDomain(
        model=str(model.model),
        revision=str(getattr(model, "revision", None) or ""),
        chunk_size=int(config.chunk_size),
        save_unfull_chunk=bool(config.save_unfull_chunk),
        kv_dtype=str(metadata.kv_dtype).removeprefix("torch."),
        world_size=1 if getattr(token_database, "save_only_first_rank", False) else int(metadata.world_size),
        layout=layout,
        probe=probe(token_database, int(config.chunk_size)),
    )


def layout(vllm_config: Any) -> str:
    """The name of the engine's KV layout as the native room gives it; empty where it has no order of its own."""
    from semkv.native.lmcache_connector import layout_tag

    return layout_tag(vllm_config)
