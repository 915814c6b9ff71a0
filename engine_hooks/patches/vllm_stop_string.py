# SPDX-License-Identifier: Apache-2.0
"""Gives a request that ended on a stop string the hashes of its prompt.

vLLM's API server looks for stop strings in the text; when it finds one it answers at once and aborts the request in the
engine. What the engine's connector returns for the aborted request never reaches the answer, which then carries no
`kv_transfer_params` at all. Here the API server's output processor adds `chunk_hashes`, computed from the prompt's
tokens with the engine's own token database (`semkv.engine_hooks.front_end_hashes`).

`add_request` notes the requests that have stop strings, `make_request_output` acts on those that ended on one; every
other request passes through untouched. vLLM 0.18 and 0.32.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from semkv.engine_hooks.patches._mechanism import Patch, Replacement

_log = logging.getLogger("semkv.engine_hooks")
MODULE = "vllm.v1.engine.output_processor"
_said: set[str] = set()


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        hashes = getattr(self, "_semkv_hashes", None)
        if hashes is not None:
            try:
                state = self.request_states.get(request.request_id)
                if state is not None and hashes.wanted(request):
                    state._semkv_hashes = hashes
            except Exception:
                _once("noting a request with stop strings")
        return result

    return add_request


def _make_request_output(original: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    at = names.index("kv_transfer_params") - 1  # without self

    @functools.wraps(original)
    def make_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        hashes = getattr(self, "_semkv_hashes", None)
        if hashes is not None:
            try:
                bound = dict(zip(names[1:], args, strict=False), **kwargs)
                if bound.get("finish_reason") is not None:
                    before = bound.get("kv_transfer_params")
                    params = hashes.answer(self, before, bound.get("stop_reason"))
                    if params is not before:
                        if len(args) > at:
                            args = (*args[:at], params, *args[at + 1 :])
                        else:
                            kwargs["kv_transfer_params"] = params
            except Exception:
                _once("adding the hashes of a request that ended on a stop string")
        return original(self, *args, **kwargs)

    return make_request_output


def _once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        _log.exception("semkv: %s failed; the answer goes out without them", what)


PATCH = Patch(
    name="vllm_stop_string",
    reason="a request that ends on a stop string answers without kv_transfer_params",
    replacements=(
        Replacement(f"{MODULE}:OutputProcessor.add_request", _add_request, parameters=("self", "request")),
        Replacement(
            f"{MODULE}:RequestState.make_request_output",
            _make_request_output,
            parameters=("self", "finish_reason", "stop_reason", "kv_transfer_params"),
        ),
    ),
)
