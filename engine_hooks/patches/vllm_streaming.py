# SPDX-License-Identifier: Apache-2.0
"""Puts `kv_transfer_params` into the final chunk of streamed chat and text completions.

vLLM's answers carry them only when they are not streamed. Here the two stream generators are wrapped: what the engine
says passes through (`_listen`), and the chunk that holds the last finish reason gets the parameters, once, as the
non-streamed answer would have them (for several prompts in one call: those of the first). Every other chunk goes
through as it is; a client that does not know the field ignores it.

vLLM 0.18 and 0.32. If the server already does so itself, nothing is added.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from semkv.engine_hooks.patches._mechanism import Patch, Replacement

_log = logging.getLogger("semkv.engine_hooks")
_FINISH = '"finish_reason":"'  # inside a JSON text every quote is escaped, so a completion cannot contain this
_FIELD = "kv_transfer_params"
_said: set[str] = set()


class FinalChunk:
    """Follows one stream: what the engine said, how many choices are open, and whether the field has been sent."""

    def __init__(self, choices: int) -> None:
        self.open = choices
        self.params: dict[str, Any] | None = None
        self.done = False

    def heard(self, prompt: int, output: Any) -> None:
        params = getattr(output, _FIELD, None)
        if prompt == 0 and isinstance(params, dict) and params:
            self.params = params

    def chunk(self, text: str) -> str:
        """The chunk to send in place of `text`."""
        if self.done or _FINISH not in text:
            return text
        self.open -= text.count(_FINISH)
        if self.open > 0:
            return text
        self.done = True
        return text if self.params is None else self._with_field(text, self.params)

    @staticmethod
    def _with_field(text: str, params: dict[str, Any]) -> str:
        body = text.rstrip()
        if not body.startswith("data: {") or not body.endswith("}") or _FIELD in json.loads(body[6:]):
            return text
        field = json.dumps(params, separators=(",", ":"), allow_nan=False)
        return f'{body[:-1]},"{_FIELD}":{field}}}{text[len(body) :]}'


async def _listen(results: AsyncIterator[Any], final: FinalChunk, numbered: bool) -> AsyncIterator[Any]:
    try:
        async for item in results:
            try:
                if numbered:
                    final.heard(int(item[0]), item[1])
                else:
                    final.heard(0, item)
            except Exception:
                _once()
            yield item
    finally:
        close = getattr(results, "aclose", None)
        if close is not None:
            await close()


def _wrapping(numbered: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
            bound = signature.bind(*args, **kwargs)
            request = bound.arguments["request"]
            prompts = int(bound.arguments.get("num_prompts", 1)) if numbered else 1
            final = FinalChunk((getattr(request, "n", None) or 1) * prompts)
            bound.arguments["result_generator"] = _listen(bound.arguments["result_generator"], final, numbered)
            async with aclosing(original(*bound.args, **bound.kwargs)) as chunks:
                async for text in chunks:
                    yield _safe(final, text)

        return stream

    return make


def _safe(final: FinalChunk, text: str) -> str:
    try:
        return final.chunk(text)
    except Exception:
        _once()
        return text


def _once() -> None:
    if "failed" not in _said:
        _said.add("failed")
        _log.exception("semkv: adding kv_transfer_params to a stream failed; it goes out without them")


CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"
TEXT_MODULE = "vllm.entrypoints.openai.completion.serving"

CHAT = Patch(
    name="vllm_streaming_chat",
    reason="a streamed chat completion carries no kv_transfer_params",
    replacements=(
        Replacement(
            f"{CHAT_MODULE}:OpenAIServingChat.chat_completion_stream_generator",
            _wrapping(numbered=False),
            parameters=("self", "request", "result_generator"),
        ),
    ),
)
TEXT = Patch(
    name="vllm_streaming_text",
    reason="a streamed text completion carries no kv_transfer_params",
    replacements=(
        Replacement(
            f"{TEXT_MODULE}:OpenAIServingCompletion.completion_stream_generator",
            _wrapping(numbered=True),
            parameters=("self", "request", "result_generator", "num_prompts"),
        ),
    ),
)
