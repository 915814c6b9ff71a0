# SPDX-License-Identifier: Apache-2.0
"""Embeddings of any server that speaks OpenAI's ``POST /v1/embeddings``.

Plain ``urllib`` in a worker thread, so that nothing is added to the agent's install. Texts go in batches; the answer
is put in the order of its ``index`` fields. Every failure is an ``EmbeddingError`` with the address (never the key) and
the way out; there are two tries, then the caller may fall back to the lexical one. The key comes from the environment
variable named by ``key_env``, never from an argument that could reach a log.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

from semkv.consumers.memory.embeddings.base import EmbeddingError, Vector

__all__ = ["OpenAIEmbedding"]

_BATCH = 64
_TRIES = 2
_MAX_ANSWER = 64 * 1024 * 1024


class OpenAIEmbedding:
    """Dense vectors from ``base_url`` (with or without ``/v1``)."""

    def __init__(self, base_url: str, model: str, *, key_env: str = "OPENAI_API_KEY", timeout: float = 10.0,
                 floor: float = 0.35) -> None:  # fmt: skip
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise EmbeddingError(
                f"base_url {base_url!r}: not an http(s) address; give one like http://127.0.0.1:8000/v1"
            )
        base = base_url.rstrip("/")
        self._url = base + ("/embeddings" if base.endswith("/v1") else "/v1/embeddings")
        self._model = model
        self._key_env = key_env
        self._timeout = timeout
        self.floor = floor
        self.name = f"openai:{model}"

    def reads(self, text: str) -> bool:
        return True

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        vectors: list[Vector] = []
        for start in range(0, len(texts), _BATCH):
            vectors.extend(await asyncio.to_thread(self._post, list(texts[start : start + _BATCH])))
        return vectors

    def _post(self, texts: list[str]) -> list[Vector]:
        body = json.dumps({"model": self._model, "input": texts}).encode()
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self._key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        for attempt in range(_TRIES):
            try:
                request = urllib.request.Request(self._url, body, headers, method="POST")
                with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                    return self._read(answer.read(_MAX_ANSWER), len(texts))
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt + 1 == _TRIES:
                    raise EmbeddingError(
                        f"{self._url}: HTTP {error.code} for model {self._model!r}; check the model's name and "
                        f"${self._key_env}"
                    ) from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                if attempt + 1 == _TRIES:
                    raise EmbeddingError(f"{self._url}: {type(error).__name__}: {error}; is the server up?") from None
        raise AssertionError("unreachable")

    def _read(self, data: bytes, wanted: int) -> list[Vector]:
        items = json.loads(data)["data"]
        ordered: list[Vector] = [
            [float(value) for value in item["embedding"]] for item in sorted(items, key=lambda item: int(item["index"]))
        ]
        if len(ordered) != wanted:
            raise ValueError(f"asked for {wanted} vectors, got {len(ordered)}")
        return ordered
