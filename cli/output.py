# SPDX-License-Identifier: Apache-2.0
"""How commands speak: one console for people, JSON lines for programs, one clear line and an exit code on failure.

With `--json` a failure is also one JSON object, `{"error", "exit_code"}`, the last line of standard output.

Exit codes: 0 done, 1 done but not all of it (a partial result, a false claim), 2 bad input, 3 nobody there to ask
(no server, no engine), 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from rich.console import Console

PARTIAL, BAD_INPUT, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130

console = Console()
if not console.is_terminal:
    # A file or a pipe has no width of its own: wide enough for the tables.
    console.width = 150
errors = Console(stderr=True)


@dataclass
class _Wanted:
    json: bool = False


wanted = _Wanted()
"""Whether this process was asked for JSON: the command line sets it before a command is parsed."""


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def filled(used: int, room: int) -> str:
    """How full something is, in the unit of the larger number: `20 of 48 KiB`; without a bound only what is used."""
    # Four digits rather than a larger unit: 100 MiB of 4096 are not 0.1 of 4 GiB.
    unit = min(max(max(used, room).bit_length() - 4, 0) // 10, len(_UNITS) - 1)

    def told(size: int) -> str:
        value = size / 1024**unit
        return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"

    return f"{told(used)} of {told(room)} {_UNITS[unit]}" if room else f"{told(used)} {_UNITS[unit]}"


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")) + "\n")
    sys.stdout.flush()


def fail(message: str, code: int) -> NoReturn:
    """Say in one line what went wrong and leave with `code`."""
    errors.print(f"semkv: {message}", markup=False, highlight=False, soft_wrap=True)
    fail_in_json(message, code)
    raise typer.Exit(code)


def fail_in_json(message: str, code: int) -> None:
    """The same for a program, where it asked for JSON."""
    if wanted.json:
        print_json({"error": message, "exit_code": code})
