# SPDX-License-Identifier: Apache-2.0
"""The C++ core, or one clear line on why it is not there.

semkv installs without a compiler as pure Python; whoever needs the core asks here. `core()` returns the module
`semkv.native._core` or raises `CoreMissingError`; `function()` is for what Python can do too, only slower. Any thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


class CoreMissingError(RuntimeError):
    """The package was built without its C++ core, or the core does not load."""


def core() -> ModuleType:
    try:
        return importlib.import_module("semkv.native._core")
    except ImportError as error:
        raise CoreMissingError(
            f"semkv's C++ core (semkv.native._core) is missing: {error}. semkv was installed where no working C++ "
            "compiler was found; install a C++20 compiler and reinstall semkv to move KV caches."
        ) from error


def function(name: str, otherwise: F) -> F:
    """The core's function of this name, or `otherwise` where there is no core, or one too old to have it."""
    try:
        found: F = getattr(core(), name, otherwise)
    except CoreMissingError:
        return otherwise
    return found
