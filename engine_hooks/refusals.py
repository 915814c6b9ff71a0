# SPDX-License-Identifier: Apache-2.0
"""What has no chunk hashes that mean anything, and why: engines by their configuration, requests by what they ask for.

LMCache's keys do not tell such caches apart (an adapter, a salt, a tag), or the process cannot name a chunk as another
process would. A reason is a short text that goes into events and logs. Pure functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from semkv.engine_hooks import hash_algorithm

LAYERWISE = "layerwise: LMCache keys every layer by itself; set use_layerwise: false"
BLENDING = "blending: LMCache's segment hashes are no prefix chain; set enable_blending: false"
SHA256_ASYNC = (
    "sha256_cbor with async loading never hits in LMCache 0.4.3 and 0.4.4 (its hashes are bytes, its lookup message "
    "wants integers); set pre_caching_hash_algorithm: builtin, or extra_config: {semkv_hash_algorithm: blake3}"
)
SHA256 = (
    "pre_caching_hash_algorithm gives hashes that are not 64-bit integers; set it to builtin, or "
    "extra_config: {semkv_hash_algorithm: blake3}"
)

TAG_PREFIX = "lmcache.tag."


def engine_reason(config: Any) -> str | None:
    """Why no request of this LMCache configuration has hashes; None if they do."""
    if getattr(config, "use_layerwise", False):
        return LAYERWISE
    if getattr(config, "enable_blending", False):
        return BLENDING
    algorithm = hash_algorithm.chosen(config)
    if algorithm.startswith("sha256"):
        return SHA256_ASYNC if getattr(config, "enable_async_loading", False) else SHA256
    return None


def unstable_reason(algorithm: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Why another process would give the same tokens other hashes; None if it would not.

    LMCache's builtin chain starts from Python's hash of PYTHONHASHSEED's text, which only a decimal seed fixes.
    """
    if algorithm == hash_algorithm.BLAKE3:
        return None
    seed = (os.environ if environment is None else environment).get("PYTHONHASHSEED")
    if seed is None:
        return "PYTHONHASHSEED is not set: every process starts its hash chain elsewhere; export PYTHONHASHSEED=0"
    if not (seed.isascii() and seed.isdigit()):
        return (
            f"PYTHONHASHSEED={seed!r} is not a decimal integer: every process hashes otherwise; export PYTHONHASHSEED=0"
        )
    return None


def request_reason(request: Any) -> str | None:
    """Why this request has no hashes; None if it has. `request` is vLLM's scheduler request or the API server's."""
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    if getattr(request, "cache_salt", None):
        return "cache_salt"
    if getattr(request, "prompt_token_ids", None) is None or getattr(request, "prompt_is_token_ids", None) is not None:
        return "prompt_embeds"
    params = getattr(request, "kv_transfer_params", None)
    if params and any(isinstance(name, str) and name.startswith(TAG_PREFIX) for name in params):
        return "tags"
    return None
