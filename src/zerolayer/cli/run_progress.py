"""A bar over many runs, with what is at work now and the time that is left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

SAY_EVERY_S = 15.0
"""Where there is no terminal to draw a bar on, a line so often."""


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
    lines = _Lines(console)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=runs)

        def watch(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)
            lines.say(f"{what}: {done:.1f} of {runs:.0f} runs")

        yield watch


class _Lines:
    """Lines in place of a bar, where there is no terminal."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._said_s = self._began_s = time.monotonic()

    def say(self, what: str) -> None:
        """Print it and the time so far, if the last line is old enough."""
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._said_s > SAY_EVERY_S:
            self._said_s = now_s
            after = f"{what} after {now_s - self._began_s:.0f} s"
            self._console.print(after, highlight=False, soft_wrap=True)


class TimeProgress:
    """A bar over time that is given, with how many candidates were tried and the best score."""

    def __init__(self, console: "Console", seconds: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=seconds)
        self._lines = _Lines(console)
        self._stage = ""
        self._tried = 0
        self._best = float("inf")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def now_at(self, stage: str) -> None:
        """What is done now, in words."""
        self._stage = stage
        self.look(0.0)

    def tried(self, score: float) -> None:
        """One more candidate has this score."""
        self._tried += 1
        self._best = min(self._best, score)
        self._stage = f"{self._tried} candidates, best {self._best:+.3f}"

    def look(self, _runs: float) -> None:
        """Some runs went on."""
        elapsed = self._progress.tasks[0].elapsed or 0.0
        self._progress.update(self._task, description=self._stage, completed=elapsed)
        self._lines.say(self._stage)
