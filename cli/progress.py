# SPDX-License-Identifier: Apache-2.0
"""Progress of things that start: one row each, with a spinner, the time, and the newest line it wrote."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_WIDTH = 64


class Row:
    """One thing that starts. Thread-safe."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def detail(self, text: str) -> None:
        """Show the newest thing it said."""
        self._progress.update(self._task, detail=escape(text[:_WIDTH]))

    def done(self, text: str = "") -> None:
        """Mark it as started."""
        self._progress.update(self._task, completed=1, detail=escape(text))


class StartProgress:
    """A context manager that shows its rows until it is left. Plain lines where the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
        )
        self._progress = Progress(*columns, console=console)

    def row(self, description: str) -> Row:
        """Add a row; its clock starts now."""
        return Row(self._progress, self._progress.add_task(description, total=1, detail=""))

    def __enter__(self) -> StartProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
