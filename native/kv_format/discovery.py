# SPDX-License-Identifier: Apache-2.0
"""Finds the classes that files of a folder define: adding a format or an engine is adding a file, nothing else.

A class is found when it is a subclass of `base`, defined in that very module, and has `key` in its own body. Errors:
`RegistryError` when two files claim the same key.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable
from types import ModuleType
from typing import TypeVar

Base = TypeVar("Base")


class RegistryError(RuntimeError):
    """Two files for the same thing."""


def discover(package: ModuleType, base: type[Base], key: str) -> dict[Hashable, type[Base]]:
    """The value of `key` → class, over all modules of the package, in the order of their names."""
    found: dict[Hashable, type[Base]] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for candidate in vars(module).values():
            if not _belongs(candidate, base, module, key):
                continue
            name = vars(candidate)[key]
            if name in found:
                raise RegistryError(f"{candidate.__module__} and {found[name].__module__} both define {key} {name!r}")
            found[name] = candidate
    return found


def _belongs(candidate: object, base: type, module: ModuleType, key: str) -> bool:
    return (
        isinstance(candidate, type)
        and issubclass(candidate, base)
        and candidate.__module__ == module.__name__
        and key in vars(candidate)
    )
