# SPDX-License-Identifier: Apache-2.0
"""The class that a built LMCache connector is given: its own, with semkv told what passes through it.

Threads: as vLLM calls a connector. Errors: the base's pass unchanged; ours never reach the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = tuple[bool, dict[str, Any] | None]


def _finish(connector: Any, finish: Callable[..., Result], request: Any, block_ids: Any) -> Result:
    side = connector._semkv_side
    if side is None:
        return finish(request, block_ids)
    record = side.before_finished(request)
    result = finish(request, block_ids)
    answered: Result = side.finished(request, record, result)
    return answered


def hooked_class(base: Any) -> Any:
    """The hooked subclass of a connector's class.

    `_semkv_side` is a SchedulerSide, a WorkerSide, or None while the connector is built. `base` is the only base:
    Python gives an existing object another class only where the layout is that one's.
    """
    if getattr(base, "_semkv_hooked", False):
        return base
    if base in _hooked:
        return _hooked[base]

    class Hooked(base):  # type: ignore[misc]  # the base is known at run time only
        """LMCache's connector with semkv's hooks."""

        _semkv_hooked = True
        _semkv_side: Any = None

        # scheduler role

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            side = self._semkv_side
            if side is None:
                return super().get_num_new_matched_tokens(request, num_computed_tokens)
            side.before_lookup(request)
            matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
            side.after_lookup(request, num_computed_tokens, matched)
            return matched

        def request_finished(self, request: Any, block_ids: Any) -> Result:
            return _finish(self, super().request_finished, request, block_ids)

        # worker role

        def register_kv_caches(self, kv_caches: Any) -> Any:
            result = super().register_kv_caches(kv_caches)
            side = self._semkv_side
            if side is not None:
                side.engine_ready()
            return result

        def get_finished(self, finished_req_ids: set[str]) -> Any:
            side = self._semkv_side
            if side is not None and finished_req_ids:
                side.requests_finished(finished_req_ids)
            return super().get_finished(finished_req_ids)

        # both

        def shutdown(self) -> Any:
            side = self._semkv_side
            if side is not None:
                side.close()
            return super().shutdown()

    if hasattr(base, "request_finished_all_groups"):
        # vLLM asks a connector with several KV groups this instead. Only where the base has it: it is told apart so.
        def request_finished_all_groups(self: Any, request: Any, block_ids: Any) -> Result:
            return _finish(self, super(Hooked, self).request_finished_all_groups, request, block_ids)

        Hooked.request_finished_all_groups = request_finished_all_groups
    Hooked.__name__ = Hooked.__qualname__ = f"Hooked{base.__name__}"
    _hooked[base] = Hooked
    return Hooked


_hooked: dict[Any, Any] = {}
