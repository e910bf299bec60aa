"""What a person sees while a fleet comes up, and what happens to it afterwards."""

import time
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_READY_WORDS = "serving at "
_BAD_WORDS = ("ended", "set aside", "stalled", "starved", "suspect")
#: A suspicion comes and goes on a busy box; `zerolayer status` has it.
_QUIET_WORDS = ("suspect", "no longer suspect")


class Event(Protocol):
    """One line of the fleet's log."""

    @property
    def engine(self) -> str:
        """`e0`, or `fleet`."""

    @property
    def what(self) -> str:
        """What happened, in words."""


class ServeProgress:
    """Prints one line for each event, with the seconds since the start."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        """`verbose`: also what changes nothing for clients."""
        self._console = console
        self._verbose = verbose
        self._began = time.monotonic()

    def line(self, who: str, what: str, style: str = "") -> None:
        """One line: when, who, what."""
        seconds = time.monotonic() - self._began
        text = f"[{style}]{escape(what)}[/]" if style else escape(what)
        self._console.print(
            f"[dim]{seconds:7.1f} s[/]  [bold]{escape(who):<6}[/] {text}",
            highlight=False,
            soft_wrap=True,
        )

    def on_event(self, event: Event) -> None:
        """An event of the fleet."""
        if event.engine == "fleet" and event.what.startswith(_READY_WORDS):
            self._ready(event.what.removeprefix(_READY_WORDS))
            return
        if not self._verbose and event.what.startswith(_QUIET_WORDS):
            return
        style = ""
        if event.what.startswith("ready"):
            style = "green"
        elif any(word in event.what for word in _BAD_WORDS):
            style = "yellow"
        self.line(event.engine, event.what, style)

    def _ready(self, url: str) -> None:
        self.line("fleet", f"ready at {url}/v1  (OpenAI API; Ctrl-C ends it)", "bold green")
        self.line("fleet", "in another shell: zerolayer status --watch")


class ModelProgress:
    """A bar while the packaged model is converted; nothing when it is there already."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("           [bold]model [/] {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=1.0, visible=False)

    def __enter__(self) -> "ModelProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: float) -> None:
        """`done` in [0, 1]."""
        self._bar.update(self._task, description=what, completed=done, visible=True)
