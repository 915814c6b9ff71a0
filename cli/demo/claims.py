# SPDX-License-Identifier: Apache-2.0
"""What the demo claims: each claim is checked when made, printed and counted. A false one fails the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Claim:
    """A sentence, whether it was seen to be true, and what was seen."""

    text: str
    holds: bool
    seen: str


@dataclass
class Claims:
    """Prints each claim as it is checked. Not thread-safe."""

    console: Console
    made: list[Claim] = field(default_factory=list)

    def check(self, text: str, holds: bool, seen: object = "") -> bool:
        """Record one claim and print it with what was seen."""
        claim = Claim(text, bool(holds), str(seen))
        self.made.append(claim)
        mark = "[green]✓[/]" if claim.holds else "[bold red]✗[/]"
        tail = f"  [dim]{escape(claim.seen)}[/]" if claim.seen else ""
        self.console.print(f"  {mark} {escape(text)}{tail}", highlight=False)
        return claim.holds

    @property
    def broken(self) -> list[Claim]:
        return [claim for claim in self.made if not claim.holds]
