# SPDX-License-Identifier: Apache-2.0
"""The agent's model calls, through the OpenAI API with the official client, streaming, as an agent makes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from openai import AsyncOpenAI

from semkv.cli.demo.texts import Message


@dataclass(frozen=True)
class Answer:
    """One answer, as the client saw it. `ttft_s` is from sending the request to the first token, in seconds."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    kv_transfer_params: dict[str, Any]

    @property
    def chunk_hashes(self) -> list[str]:
        """The prompt's chunk hashes as the engine's answer has them (legacy hex); empty when it has none."""
        return list(self.kv_transfer_params.get("chunk_hashes", ()))


class Model:
    """One served model. Token ids are asked for, so that outputs can be compared exactly."""

    def __init__(self, url: str, name: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=180)
        self._name = name

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        traceparent: str | None = None,
        tokens: int = 16,
    ) -> Answer:
        """Ask greedily for `tokens` tokens. Raises the openai package's errors."""
        semkv = {key: value for key, value in (("session", session), ("traceparent", traceparent)) if value}
        extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        if semkv:
            extra["kv_transfer_params"] = {"semkv": semkv}
        begin = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=self._name,
            messages=cast(Any, list(messages)),
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        first: float | None = None
        request_id, text = "", ""
        token_ids: list[int] = []
        prompt: list[int] = []
        parameters: dict[str, Any] = {}
        async for chunk in stream:
            request_id = chunk.id
            more = chunk.model_extra or {}
            prompt = more.get("prompt_token_ids") or prompt
            parameters = more.get("kv_transfer_params") or parameters
            for choice in chunk.choices:
                new = (choice.model_extra or {}).get("token_ids") or ()
                if new and first is None:
                    first = time.perf_counter()
                token_ids += new
                text += choice.delta.content or ""
        end = time.perf_counter()
        return Answer(
            request_id, text, tuple(token_ids), tuple(prompt), (first or end) - begin, end - begin, parameters
        )

    async def close(self) -> None:
        await self._client.close()
