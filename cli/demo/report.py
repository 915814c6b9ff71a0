# SPDX-License-Identifier: Apache-2.0
"""What the demo prints at its end: the timeline, the trace of the last prefetch, the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from semkv.cli.demo.claims import Claims
from semkv.cli.demo.play import Measured
from semkv.cli.traces.store import Span
from semkv.cli.traces.tree import print_trace
from semkv.consumers.memory.explain import words

_BAR = 40


def print_timeline(console: Console, measured: Measured) -> None:
    """Times to first token of the same prompt, three ways; medians of the rounds."""
    console.print(f"\n[bold]Time to first token of the same {measured.prompt_tokens}-token prompt[/]", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "median s", "rounds s", ""):
        table.add_column(heading, justify="right" if heading.endswith("s") else "left")
    rows = (
        ("recomputed", measured.recomputed),
        ("loaded from the SSD, no prefetch", measured.from_disk),
        ("prefetched to DDR", measured.prefetched),
    )
    longest = max((statistics.median(times) for _, times in rows if times), default=1.0)
    for name, times in rows:
        if times:
            median = statistics.median(times)
            bar = "█" * max(1, round(median / longest * _BAR))
            table.add_row(name, f"{median:.3f}", " ".join(f"{time:.3f}" for time in times), f"[cyan]{bar}[/]")
    console.print(table)


def print_decision(console: Console, measured: Measured, store: Path) -> None:
    """Why the last prefetch was given, as `semkv why` says it."""
    if measured.prefetch is None:
        return
    console.print("\n[bold]Why the last prefetch[/]")
    console.print(words(measured.prefetch), markup=False, highlight=False, soft_wrap=True)
    console.print(f"  asked again with: semkv why {measured.prefetch.command_id} --store {store}", highlight=False)


def print_prefetch_trace(console: Console, spans: Sequence[Span]) -> None:
    """The trace, as a tree."""
    console.print("\n[bold]The last prefetch, from the agent's search to the bytes read in the worker[/]")
    print_trace(console, spans)


def print_verdict(console: Console, claims: Claims) -> None:
    """One line, and the broken claims if there are any."""
    broken = claims.broken
    if not broken:
        console.print(f"\n[bold green]all {len(claims.made)} claims hold[/]")
        return
    console.print(f"\n[bold red]{len(broken)} of {len(claims.made)} claims do not hold:[/]")
    for claim in broken:
        console.print(f"  ✗ {claim.text} — {claim.seen}", markup=False, highlight=False)
