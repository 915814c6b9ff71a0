# SPDX-License-Identifier: Apache-2.0
"""xiaoO's TOML: the two keys of ``[llm]`` that switch KV cache coordination and its debug files.

Both default to false, as there. Unknown keys are left alone. A file that cannot be read or a value that is not a
boolean is an ``XiaoOError`` with the file, the key and what is allowed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["XiaoOError", "XiaoOSettings"]


class XiaoOError(ValueError):
    """A setting that cannot be used."""


@dataclass(frozen=True)
class XiaoOSettings:
    """What an agent's configuration asks of the memory map."""

    kvcache_enabled: bool = False
    kvcache_debug_enabled: bool = False

    @classmethod
    def load(cls, path: Path | str) -> XiaoOSettings:
        """Reads the agent's configuration file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise XiaoOError(f"{path}: {error.strerror or error}; give the agent's TOML file") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "configuration") -> XiaoOSettings:
        """Reads the text of such a file."""
        toml = _toml()
        try:
            document: dict[str, Any] = toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise XiaoOError(f"{name}: no TOML: {error}") from None
        section = document.get("llm", {})
        if not isinstance(section, dict):
            raise XiaoOError(f"{name}: llm: {section!r:.40} must be a table, written as [llm]")
        values = {}
        for key in ("kvcache_enabled", "kvcache_debug_enabled"):
            value = section.get(key, False)
            if not isinstance(value, bool):
                raise XiaoOError(f"{name}: [llm] {key}: {value!r:.40} must be true or false")
            values[key] = value
        return cls(**values)


def _toml() -> Any:
    for module in ("tomllib", "tomli"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
    raise XiaoOError("reading TOML on Python 3.10 needs one more package: pip install tomli")
