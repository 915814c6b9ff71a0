# SPDX-License-Identifier: Apache-2.0
"""One full message of every type, with every field set: the material of the golden bytes and of the codec's tests."""

from __future__ import annotations

from semkv.bus.domain import HashDomain
from semkv.bus.messages import (
    Accepted,
    Cancel,
    EngineInfo,
    Evict,
    Finished,
    Heartbeat,
    Locate,
    Message,
    Outcome,
    Prefetch,
    Release,
    Result,
    Retain,
    TierUsage,
)
from semkv.bus.status import ChunkStatus, HashesStatus, Op, Order, Role, State, Tier

DOMAIN = HashDomain(
    model="Qwen/Qwen3-8B",
    revision="main",
    chunk_size=256,
    save_unfull_chunk=False,
    kv_dtype="bfloat16",
    world_size=2,
    layout="paged-bf16-b16",
    probe=-6148914691236517206,
)
HASHES = (-1, 0, 1, 255, -9223372036854775808, 9223372036854775807)

_WHERE = {"tenant": "acme", "domain": DOMAIN.fingerprint, "instance": "engine-0"}
_COMMAND = {**_WHERE, "command_id": "0197a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b", "client": "agent-7"}

SAMPLES: tuple[Message, ...] = (
    Accepted(**_COMMAND, op=Op.PREFETCH, rank=1, epoch=1767225600000000000, queued_ms=1.5),
    Cancel(**_COMMAND, target_command_id="0197a1b2-c3d4-7e5f-8a6b-000000000000"),
    EngineInfo(
        domain=DOMAIN.fingerprint,
        instance="engine-0",
        epoch=1767225600000000000,
        rank=1,
        world_size=2,
        role=Role.STORAGE,
        hash_domain=DOMAIN,
        capabilities=("prefetch", "evict"),
        tiers=(TierUsage(name="cpu", capacity_bytes=1 << 30, used_bytes=1 << 20, chunks=4),),
        versions={"semkv": "0.1.0", "lmcache": "0.4.3"},
        inflight=2,
    ),
    Evict(**_COMMAND, session="s-1", chunk_hashes=HASHES, tiers=(Tier.CPU, Tier.DISK), force=True, dry_run=True),
    Finished(
        **_WHERE,
        epoch=1767225600000000000,
        seq=41,
        request_id="cmpl-1",
        engine_request_id="cmpl-1-0a1b2c3d",
        index=0,
        session="s-1",
        finish_reason="stop",
        hashes_status=HashesStatus.KNOWN,
        reason="",
        chunk_hashes=HASHES,
        part=1,
        parts=1,
        chunk_size=256,
        prompt_tokens=1600,
        lmcache_hit_tokens=512,
        engine_cached_tokens=256,
        generated_tokens=99,
        arrived_at=1767225600000000001,
        finished_at=1767225601000000001,
    ),
    Heartbeat(**_WHERE, epoch=1767225600000000000, last_seq=41),
    Locate(**_COMMAND, chunk_hashes=HASHES),
    Outcome(
        **_WHERE, command_id=_COMMAND["command_id"], rank=0, useful=3, redundant=1, late=1, wasted=1, bytes=123456,
        lead_ms=-12.5,
    ),
    Prefetch(
        **_COMMAND, session="s-1", chunk_hashes=HASHES, order=Order.SET, tier=Tier.CPU, expires_in_ms=2000,
        budget_bytes=1 << 28, dry_run=True,
    ),
    Release(**_COMMAND, session="s-1"),
    Result(
        **_COMMAND, op=Op.PREFETCH, rank=1, world_size=2, epoch=1767225600000000000, state=State.PARTIAL,
        reason="no memory for 1 chunk",
        chunk_status=(ChunkStatus.LOADED, ChunkStatus.ALREADY_THERE, ChunkStatus.MISSING, ChunkStatus.UNREACHABLE,
                      ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED),
        counts={"loaded": 1, "already_there": 1, "missing": 1, "unreachable": 1, "no_memory": 1, "not_tried": 1},
        bytes_by_tier={"cpu": 1048576}, usable_prefix=2, queued_ms=0.25, ran_ms=3.5,
        trace_id="0af7651916cd43dd8448eb211c80319c", chunk_tiers=((Tier.CPU, Tier.DISK), (), (Tier.REMOTE,)),
        hash_domain=DOMAIN,
    ),
    Retain(**_COMMAND, session="s-1", chunk_hashes=HASHES, ttl_s=600, part=1, parts=2),
)  # fmt: skip
