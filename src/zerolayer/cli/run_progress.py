"""A bar over many runs, with what is at work now and the time that is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def run_progress(console: "Console", runs: float) -> Iterator[Callable[[float, str], None]]:
    """Gives a function of (runs done with parts of runs, what is at work)."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.1f}/{task.total:.0f} runs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=runs)

        def watch(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)

        yield watch
