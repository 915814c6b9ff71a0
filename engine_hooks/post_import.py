# SPDX-License-Identifier: Apache-2.0
"""Run a callback once a module has been imported, without importing it.

`when_imported(name, callback)` calls `callback(module)` at once if the module is already there, and otherwise right
after its first import has finished. It exists because the plugin must not import torch, LMCache or vLLM's server
modules itself, yet has to change a function in some of them before it is used.

Threads: the import system holds the module's own lock while the callback runs; callbacks must be short.
Errors: a callback that raises is logged and swallowed. An import never fails because of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

_log = logging.getLogger("semkv.engine_hooks")
Callback = Callable[[ModuleType], None]


def _run(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        _log.exception(
            "semkv: the hook on module %s failed; the module is used unchanged: %s: %s",
            module.__name__,
            type(error).__name__,
            error,
        )


class _Loader(importlib.abc.Loader):
    """The module's own loader, with the callbacks run behind `exec_module`."""

    def __init__(self, inner: importlib.abc.Loader, callbacks: Sequence[Callback]) -> None:
        self._inner = inner
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Put the real loader back first: code that looks at `__loader__` (inspect, importlib.resources) sees the truth.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        for callback in self._callbacks:
            _run(callback, module)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands first on `sys.meta_path` while at least one module is waited for, and leaves when none is."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting or getattr(self._busy, "name", None) == fullname:
            return None
        self._busy.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.name = None
        if spec is None or spec.loader is None:
            return None
        with _lock:
            callbacks = self.waiting.pop(fullname, [])
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


_lock = threading.Lock()
_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` when module `name` is there: now, or right after its first import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _run(callback, module)
        return
    with _lock:
        _finder.waiting.setdefault(name, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def waiting() -> tuple[str, ...]:
    """The modules still waited for, for the tests and the doctor."""
    return tuple(_finder.waiting)
