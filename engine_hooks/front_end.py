# SPDX-License-Identifier: Apache-2.0
"""What is hooked in the process that answers requests: vLLM's API server, or whoever uses `LLM` or `AsyncLLM`.

`register` only arranges for it: each module is hooked when vLLM imports it, so an engine process that never serves pays
nothing. Errors: none reach vLLM.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from semkv.engine_hooks.post_import import when_imported
from semkv.engine_hooks.settings import HookSettings

_log = logging.getLogger("semkv.engine_hooks")
_MARK = "__semkv_wrapped__"

OUTPUTS = "vllm.v1.engine.output_processor"
CHAT = "vllm.entrypoints.openai.chat_completion.serving"
TEXT = "vllm.entrypoints.openai.completion.serving"
ENGINES = (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm.v1.engine.llm_engine", "LLMEngine"))


def register() -> None:
    """Arrange for the front end's modules to be hooked when they are imported."""
    when_imported(OUTPUTS, lambda _module: _apply("vllm_stop_string", "PATCH"))
    when_imported(CHAT, lambda _module: _apply("vllm_streaming", "CHAT"))
    when_imported(TEXT, lambda _module: _apply("vllm_streaming", "TEXT"))
    for module, name in ENGINES:
        when_imported(module, functools.partial(_wrap_engine, name=name))


def _apply(module: str, patch: str) -> None:
    import importlib

    from semkv.engine_hooks.patches import apply

    apply([getattr(importlib.import_module(f"semkv.engine_hooks.patches.{module}"), patch)])


def _wrap_engine(module: ModuleType, *, name: str) -> None:
    engine_class = getattr(module, name)
    original = engine_class.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialise(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        give_hashes(self.output_processor, vllm_config)

    setattr(initialise, _MARK, original)
    engine_class.__init__ = initialise


def give_hashes(output_processor: Any, vllm_config: Any) -> None:
    """Let an output processor answer stop-string requests of an engine with a KV transfer."""
    try:
        if getattr(vllm_config, "kv_transfer_config", None) is None:
            return
        from semkv.engine_hooks.front_end_hashes import FrontEndHashes

        hashes = FrontEndHashes(vllm_config, HookSettings.from_env())
        output_processor._semkv_hashes = hashes
        hashes.start()
    except Exception:
        _log.exception("semkv: answers that end on a stop string carry no chunk hashes")
