# SPDX-License-Identifier: Apache-2.0
"""Chunk hashes of a finished request, computed again from its prompt: for lookup clients that cannot be listened to.

Uses the lookup client's own token database with the tokens that LMCache's lookup uses (multi-modal placeholders and
`skip_last_n_tokens` included). Scheduler's thread. Costs one chain hash of the prompt.
"""

from __future__ import annotations

from typing import Any

from semkv.engine_hooks.lookup_client import HashTexts


class Recompute:
    """Call it with vLLM's request; the answer is the hashes as LMCache's texts."""

    def __init__(self, token_database: Any, texts: HashTexts, impl: Any) -> None:
        self._database = token_database
        self._texts = texts
        self._impl = impl

    def __call__(self, request: Any) -> list[str] | None:
        tokens = list(request.prompt_token_ids)
        if getattr(request, "mm_features", None):
            tokens = self._with_media(request, tokens)
        skip = int(getattr(self._impl, "skip_last_n_tokens", 0) or 0)
        if skip > 0:
            tokens = tokens[:-skip]
        return self._texts.of(list(self._database.process_tokens(tokens, make_key=False)))

    @staticmethod
    def _with_media(request: Any, tokens: list[int]) -> list[int]:
        import torch
        from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids
        from lmcache.integration.vllm.vllm_v1_adapter import extract_mm_features

        hashes, positions = extract_mm_features(request)
        if not hashes or not positions:
            return tokens
        overwritten = torch.tensor(tokens)
        apply_mm_hashes_to_token_ids(overwritten, hashes, positions)
        found: list[int] = overwritten.tolist()
        return found
