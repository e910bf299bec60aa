"""A server as a process of its own: started, waited for, looked at, and always ended.

It has its own process group, so that a Ctrl-C on the terminal reaches the measurement alone, which
then ends the server; and it dies with the measurement, however that ends. Start it in the main
thread: the kernel ties its life to the thread that started it.

It shares the measurement's session. Linux weighs sessions against each other (`sched_autogroup`),
and beside a busy server a client in another one did not get a core for seconds at a time: that
would be measured as a pause of every stream.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from zerolayer.core.errors import EngineError
from zerolayer.engines.lifetime import die_with_parent

START_TIMEOUT_S = 300.0
#: After SIGTERM; then SIGKILL.
END_GRACE_S = 15.0
#: What is left of the tree may take so long to go once its root is gone.
LEFTOVER_GRACE_S = 5.0
POLL_S = 0.25
HTTP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 25
LOG_TAIL_BYTES = 16_384
_SHM = re.compile(r"(/dev/shm/\S+)$")

Progress = Callable[[str], None]
"""Called with one line about what is being waited for."""


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process of a server's tree."""

    pid: int
    name: str
    rss_bytes: int
    cpu_s: float
    """User and system time so far."""


@dataclass(frozen=True)
class EndReport:
    """How a server ended, and what it left behind."""

    exit_code: int | None
    seconds: float
    """From the signal until its process was gone."""
    killed: bool
    """It did not end by itself within the grace period."""
    leftover_processes: tuple[str, ...] = ()
    """`pid name` of what lived on; it was killed afterwards."""
    leftover_files: tuple[str, ...] = ()
    """Its sockets, and what of it is still in /dev/shm."""

    @property
    def clean(self) -> bool:
        """Nothing was left and nothing had to be killed."""
        return not (self.killed or self.leftover_processes or self.leftover_files)


@dataclass(frozen=True)
class ServerCommand:
    """What to start."""

    title: str
    """For messages: "zerolayer serve"."""
    argv: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    log_dir: Path | None = None
    """Where its output goes; a folder that is removed after a clean end when None."""
    start_timeout_s: float = START_TIMEOUT_S


class ServerProcess:
    """See the module's docstring. A context manager: entering starts, leaving ends."""

    def __init__(self, command: ServerCommand, on_progress: Progress = lambda line: None) -> None:
        self.command = command
        self.base_url = f"http://127.0.0.1:{command.port}"
        self.ended: EndReport | None = None
        self.start_seconds = 0.0
        self._failed = False
        self._on_progress = on_progress
        self._own_log_dir = command.log_dir is None
        self.log_dir = command.log_dir or Path(tempfile.mkdtemp(prefix="zerolayer-bench-"))
        self.log_path = self.log_dir / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[psutil.Process, str] = {}
        self._held_files: set[str] = set()
        self._http = httpx.Client(base_url=self.base_url, timeout=HTTP_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        began = time.monotonic()
        self._start()
        try:
            self._wait_until_ready(began)
        except BaseException:
            self._failed = True
            self.end()
            raise
        self.start_seconds = time.monotonic() - began
        self.tree()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._failed = error is not None
        self.end()
        if error is not None and self._own_log_dir:
            error.add_note(f"logs of {self.command.title}: {self.log_dir}")

    @property
    def pid(self) -> int:
        """The server's own pid."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._process is not None and self._process.poll() is None

    def tree(self) -> list[ProcessRow]:
        """The server and everything that it started, as of now."""
        rows = []
        for process in self._tree_now():
            with contextlib.suppress(psutil.Error), process.oneshot():
                self._seen[process] = process.name()
                times = process.cpu_times()
                rss = process.memory_info().rss
                rows.append(ProcessRow(process.pid, process.name(), rss, times.user + times.system))
        return rows

    def get(self, path: str) -> httpx.Response:
        """One GET. Raises `httpx.HTTPError`."""
        return self._http.get(path)

    def log_tail(self) -> str:
        """The last lines of its output and of each other log beside it, for error messages."""
        parts: list[str] = []
        for path in [self.log_path, *sorted(self.log_dir.glob("*.log"))]:
            if path.is_file() and (path != self.log_path or not parts):
                lines = _tail(path)
                parts.append(f"--- {path} (end)\n" + "\n".join(lines))
        return "\n".join(parts)

    def end(self, number: signal.Signals = signal.SIGTERM) -> EndReport:
        """End the server, if it runs, with this signal; safe to call twice."""
        if self.ended is not None:
            return self.ended
        self._note_what_it_holds()
        began = time.monotonic()
        killed = self._stop_root(number)
        seconds = time.monotonic() - began
        left = self._leftover_processes()
        files = tuple(sorted(path for path in self._left_files() if os.path.exists(path)))
        code = self._process.returncode if self._process is not None else None
        self.ended = EndReport(code, round(seconds, 2), killed, left, files)
        self._http.close()
        if self._own_log_dir and self.ended.clean and not self._failed:
            shutil.rmtree(self.log_dir, ignore_errors=True)
        return self.ended

    # -- for the two kinds of server --------------------------------------------------------------

    def _ready(self) -> tuple[bool, str]:
        """Whether all of it serves, and how far it is, in words."""
        raise NotImplementedError

    def _left_files(self) -> set[str]:
        """Paths that must be gone once the server is."""
        return self._held_files

    # -- inside -----------------------------------------------------------------------------------

    def _start(self) -> None:
        parent = os.getpid()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.environment},
                process_group=0,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - no threads yet
            )

    def _wait_until_ready(self, began: float) -> None:
        said = ""
        while True:
            if not self.running:
                assert self._process is not None
                raise EngineError(
                    f"{self.command.title} ended while it was starting "
                    f"(exit status {self._process.returncode})\n{self.log_tail()}"
                )
            seconds = time.monotonic() - began
            if seconds > self.command.start_timeout_s:
                raise EngineError(
                    f"{self.command.title} was not ready after "
                    f"{self.command.start_timeout_s:.0f} s\n{self.log_tail()}"
                )
            try:
                ready, words = self._ready()
            except httpx.HTTPError:
                ready, words = False, "loading"
            if words != said:
                self._on_progress(f"{self.command.title}: {words} ({seconds:.0f} s)")
                said = words
            if ready:
                return
            time.sleep(POLL_S)

    def _tree_now(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _note_what_it_holds(self) -> None:
        """Remember its processes, their shared memory and their sockets while they can be asked."""
        if not self.running:
            return
        self.tree()
        for process in self._seen:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if (found := _SHM.search(line)) is not None:
                        self._held_files.add(found.group(1))
            with contextlib.suppress(psutil.Error):
                sockets = process.net_connections("unix")
                names = (str(each.laddr) for each in sockets)
                self._held_files.update(name for name in names if name.startswith("/"))

    def _stop_root(self, number: signal.Signals) -> bool:
        """The signal, then SIGKILL; True when the second one was needed."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(number)
        try:
            process.wait(END_GRACE_S)
            return False
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_GRACE_S)
            return True

    def _leftover_processes(self) -> tuple[str, ...]:
        _, alive = psutil.wait_procs(list(self._seen), timeout=LEFTOVER_GRACE_S)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                left.append(f"{process.pid} {self._seen[process]}")
                process.kill()
        return tuple(left)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def status_json(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises `httpx.HTTPError`."""
    response.raise_for_status()
    value = response.json()
    assert isinstance(value, dict)
    return value


def _tail(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return text.splitlines()[-LOG_TAIL_LINES:]
