# SPDX-License-Identifier: Apache-2.0
"""The hash domain: its fingerprint is pinned, depends on every field, and differences are named."""

from __future__ import annotations

import msgpack
from blake3 import blake3

from semkv.bus.domain import HashDomain
from tests.contracts.samples import DOMAIN


def test_the_fingerprint_is_what_the_contract_says() -> None:
    packed = msgpack.packb(
        {
            "chunk_size": 256,
            "kv_dtype": "bfloat16",
            "layout": "paged-bf16-b16",
            "model": "Qwen/Qwen3-8B",
            "probe": (-6148914691236517206).to_bytes(8, "big", signed=True),
            "revision": "main",
            "save_unfull_chunk": False,
            "world_size": 2,
        }
    )
    assert DOMAIN.canonical() == packed
    assert DOMAIN.fingerprint == blake3(packed).hexdigest()[:12]


def test_every_field_changes_it_and_is_named() -> None:
    changed = {
        "model": "m", "revision": "r", "chunk_size": 16, "save_unfull_chunk": True, "kv_dtype": "fp8", "world_size": 1,
        "layout": "other", "probe": 3,
    }  # fmt: skip
    assert set(changed) == set(HashDomain.model_fields)
    for field, value in changed.items():
        other = HashDomain(**{**DOMAIN.model_dump(), field: value})
        assert other.fingerprint != DOMAIN.fingerprint
        assert DOMAIN.differences(other) == {field: (getattr(DOMAIN, field), value)}
    assert DOMAIN.differences(DOMAIN) == {}


def test_a_copy_with_other_fields_has_another_fingerprint() -> None:
    assert DOMAIN.fingerprint  # whatever was computed before must not travel with the copy
    other = DOMAIN.model_copy(update={"kv_dtype": "fp8"})
    assert other.fingerprint == HashDomain(**{**DOMAIN.model_dump(), "kv_dtype": "fp8"}).fingerprint
    assert other.fingerprint != DOMAIN.fingerprint
    assert DOMAIN.model_copy(deep=True).fingerprint == DOMAIN.fingerprint
