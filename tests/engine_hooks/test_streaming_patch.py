# SPDX-License-Identifier: Apache-2.0
"""The final chunk of a stream, and what becomes of a patch on a function it does not know."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from semkv.engine_hooks.patches import PatchState, apply
from semkv.engine_hooks.patches.vllm_streaming import CHAT, FinalChunk, _listen, _wrapping

PARAMS = {"chunk_hashes": ["-1", "ff"], "text": 'quotes " and \\ and 中文'}


def chunk(finish: str | None, text: str = "hi", index: int = 0) -> str:
    body = {"id": "x", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def final(choices: int = 1, params: Any = PARAMS) -> FinalChunk:
    made = FinalChunk(choices)
    made.heard(0, SimpleNamespace(kv_transfer_params=params))
    return made


def test_only_the_chunk_with_the_last_finish_reason_is_changed() -> None:
    made = final(choices=2)
    texts = [chunk(None), chunk("length"), chunk(None, index=1), chunk("stop", index=1), "data: [DONE]\n\n"]
    sent = [made.chunk(text) for text in texts]
    assert [before == after for before, after in zip(texts, sent, strict=True)] == [True, True, True, False, True]
    assert sent[3].endswith("\n\n")
    body = json.loads(sent[3][6:])
    assert body.pop("kv_transfer_params") == PARAMS
    assert body == json.loads(texts[3][6:]), "nothing else changes"


def test_a_completion_cannot_imitate_a_finish_reason() -> None:
    made = final()
    text = chunk(None, text='"finish_reason":"stop"')
    assert made.chunk(text) == text and not made.done
    assert "kv_transfer_params" in made.chunk(chunk("stop"))


@pytest.mark.parametrize("params", [None, {}, "text"])
def test_nothing_to_say_changes_nothing(params: Any) -> None:
    assert final(params=params).chunk(chunk("stop")) == chunk("stop")


def test_a_server_that_says_it_itself_is_left_alone() -> None:
    text = chunk("stop")[:-3] + ',"kv_transfer_params":{"a":1}}\n\n'
    assert final().chunk(text) == text


def test_only_the_first_prompts_parameters() -> None:
    made = FinalChunk(1)
    made.heard(1, SimpleNamespace(kv_transfer_params=PARAMS))
    assert made.params is None


def test_leaving_early_ends_the_engines_stream() -> None:
    ended: list[str] = []

    async def results() -> AsyncIterator[Any]:
        try:
            for number in range(10):
                yield SimpleNamespace(kv_transfer_params=None, number=number)
        finally:
            ended.append("engine")

    async def serve(self: Any, request: Any, result_generator: Any) -> AsyncIterator[str]:
        try:
            async for _ in result_generator:
                yield chunk(None)
        finally:
            ended.append("server")
            await result_generator.aclose()

    async def main() -> None:
        stream = _wrapping(numbered=False)(serve)(None, SimpleNamespace(n=None), results())
        assert await anext(stream) == chunk(None)
        await stream.aclose()

    asyncio.run(main())
    assert ended == ["server", "engine"]


def test_an_unknown_shape_of_results_does_no_harm() -> None:
    async def results() -> AsyncIterator[Any]:
        yield "not a pair"

    async def main() -> list[Any]:
        return [item async for item in _listen(results(), FinalChunk(1), True)]

    assert asyncio.run(main()) == ["not a pair"]


def test_an_unknown_function_is_left_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = types.ModuleType("semkv_t_serving")

    class OpenAIServingChat:
        async def chat_completion_stream_generator(self, everything: Any) -> AsyncIterator[str]:
            yield ""

    module.OpenAIServingChat = OpenAIServingChat
    monkeypatch.setitem(sys.modules, "semkv_t_serving", module)
    replacement = CHAT.replacements[0]
    target = replacement.target.replace(replacement.target.partition(":")[0], "semkv_t_serving")
    patch = type(CHAT)("t", "test", (type(replacement)(target, replacement.make, parameters=replacement.parameters),))
    before = OpenAIServingChat.chat_completion_stream_generator
    (report,) = apply([patch])
    assert report.state is PatchState.UNKNOWN_FUNCTION and "result_generator" in report.detail
    assert OpenAIServingChat.chat_completion_stream_generator is before
    assert len([r for r in caplog.records if "left out" in r.getMessage()]) == 1
