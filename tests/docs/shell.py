# SPDX-License-Identifier: Apache-2.0
"""Every shell command that the pages show: in blocks, fenced or indented, and between backticks. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_LANGUAGES = {"python", "javascript", "json", "yaml", "mermaid"}
PROGRAMS = (
    "make", "semkv", "pip", "python", "python3", "docker", "docker-compose", "nats", "nats-server", "vllm", "curl",
    "export", "git", "apt-get", "npm", "node", "bash", "sudo", "prometheus", "set",
)  # fmt: skip

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
_INDENTED = re.compile(r"^ {4}\S.*$", re.M)
_TICKS = re.compile(r"`([^`]+)`")
_VARIABLES = r"(?:[A-Z_]+=\S+ +)*"
_NAMES = "|".join(map(re.escape, PROGRAMS))
_COMMAND = re.compile(rf"(?:\$ )?{_VARIABLES}(?:\.venv/bin/)?(?:{_NAMES})(?: +(.*))?$", re.S)


@dataclass(frozen=True)
class Command:
    """One command as a page has it, without its comment."""

    page: Path
    text: str
    shown: str
    """`block` or `inline`; what is inline is named, perhaps with placeholders, rather than to be typed."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def commands(page: Path) -> list[Command]:
    """The page's commands in order: those of blocks, then those inline."""
    text = page.read_text()
    prose = _FENCE.sub("", text)
    found = [Command(page, line, "block") for match in _FENCE.finditer(text) for line in _of_fence(match[1], match[2])]
    found += [Command(page, line, "block") for line in _lines("\n".join(_INDENTED.findall(prose)))]
    inline = (re.sub(r"\s+", " ", ticked) for ticked in _TICKS.findall(_INDENTED.sub("", prose)))
    return found + [Command(page, ticked, "inline") for ticked in inline if (m := _COMMAND.match(ticked)) and m[1]]


def _of_fence(language: str, text: str) -> Iterator[str]:
    if language in OTHER_LANGUAGES:
        return
    yield from _lines(text, every=language in {"sh", "bash", "console"})


def _lines(text: str, *, every: bool = False) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        bare = re.sub(r"(^|\s+)#\s.*$", "", line.strip()).removeprefix("$ ")
        if bare and (every or _COMMAND.match(bare)):
            yield bare
