"""How long an engine's threads have waited for a core: the kernel's run-queue times.

`/proc/<pid>/task/<tid>/schedstat` has "ran waited slices", the first two in ns (kernel,
Documentation/scheduler/sched-stats.rst). A wait is added there when it ends. So a thread in state R
whose three numbers stand still is waiting now, and the time between two looks counts at once.

The threads of a step wait for each other: what one of them waits, the step waits, also while others
run, as they may spin until it comes (a thread of a healthy engine was seen to wait 2.2 s so). Waits
of several threads between two looks add up as far as none of them ran; the longest counts in full.

Only those that compute are looked at, and the first thread of each process, which runs little but
begins and ends each step: an engine has some sixty threads, most of which sleep.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPUTING_SHARE = 0.1
"""A thread that ran this share of what the busiest ran is one of those that compute."""
THREADS_MAX = 8
"""Of those that compute; they get on alike."""
CHOOSE_EVERY_NS = 2_000_000_000
CHOOSE_RAN_NS = 20_000_000
"""Where the busiest ran less since the last choice, the choice stands: the engine was idle."""
_BYTES = 512
_PROC = Path("/proc")


@dataclass(slots=True)
class _Thread:
    """One thread that is looked at."""

    schedstat: int
    stat: int
    ran_ns: int
    waited_ns: int
    slices: int
    early_ns: int = 0
    """Of a wait that has not ended: what was counted of it already."""

    @classmethod
    def open(cls, folder: str) -> "_Thread":
        """Raises OSError when it has ended, ValueError when the kernel keeps no such times."""
        schedstat = os.open(f"{folder}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            times = _times(schedstat)
            stat = os.open(f"{folder}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            os.close(schedstat)
            raise
        return cls(schedstat, stat, *times)

    def close(self) -> None:
        os.close(self.schedstat)
        os.close(self.stat)

    def look(self, passed_ns: int) -> tuple[int, int]:
        """(ran, waited) ns since the last look. Raises OSError or ValueError when it has ended."""
        ran_ns, waited_ns, slices = _times(self.schedstat)
        ran, waited = ran_ns - self.ran_ns, waited_ns - self.waited_ns
        if (ran, waited, slices) == (0, 0, self.slices):
            if not self._is_runnable():
                return 0, 0
            self.early_ns += passed_ns
            return 0, passed_ns
        self.ran_ns, self.waited_ns, self.slices = ran_ns, waited_ns, slices
        early_ns, self.early_ns = self.early_ns, 0
        return ran, max(0, waited - early_ns)

    def _is_runnable(self) -> bool:
        raw = os.pread(self.stat, _BYTES, 0)
        return raw[raw.rfind(b")") + 2 :][:1] == b"R"


class CoreWaits:
    """Follows the threads of an engine that compute."""

    def __init__(self, pids: Sequence[int], proc: Path = _PROC) -> None:
        self._tasks = [f"{proc}/{pid}/task" for pid in pids]
        self._first = [f"{proc}/{pid}/task/{pid}" for pid in pids]
        self._threads: dict[str, _Thread] = {}
        self._ran_ns: dict[str, int] = {}
        self._looked_ns: int | None = None
        self._choose_ns = 0
        self._waited_ns = 0

    def look(self, now_ns: int) -> int:
        """Ns that it has waited for a core since the first look; never falls. 0 for ever where the
        kernel does not tell."""
        passed_ns = now_ns - (self._looked_ns if self._looked_ns is not None else now_ns)
        self._looked_ns = now_ns
        ran_max = waited_max = waited_sum = 0
        for folder, thread in list(self._threads.items()):
            try:
                ran, waited = thread.look(passed_ns)
            except (OSError, ValueError):
                thread.close()
                del self._threads[folder]
                continue
            ran_max, waited_max = max(ran_max, ran), max(waited_max, waited)
            waited_sum += waited
        self._waited_ns += max(waited_max, min(waited_sum, passed_ns - ran_max))
        if now_ns >= self._choose_ns:
            self._choose_ns = now_ns + CHOOSE_EVERY_NS
            self._choose()
        return self._waited_ns

    def close(self) -> None:
        """Give the descriptors back."""
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()

    def _choose(self) -> None:
        """Look at those that ran most since the last choice."""
        before, self._ran_ns = self._ran_ns, self._ran_of_all()
        ran = {folder: ns - before.get(folder, 0) for folder, ns in self._ran_ns.items()}
        busiest = max(ran.values(), default=0)
        if self._threads and busiest < CHOOSE_RAN_NS:
            return
        computing = [each for each, ns in ran.items() if ns and ns >= COMPUTING_SHARE * busiest]
        computing.sort(key=lambda each: (-ran[each], each))
        chosen = dict.fromkeys(self._first + computing[:THREADS_MAX])
        for folder in self._threads.keys() - chosen.keys():
            self._threads.pop(folder).close()
        for folder in chosen:
            if folder not in self._threads:
                with contextlib.suppress(OSError, ValueError):
                    self._threads[folder] = _Thread.open(folder)

    def _ran_of_all(self) -> dict[str, int]:
        ran: dict[str, int] = {}
        for tasks in self._tasks:
            with contextlib.suppress(OSError):
                for name in os.listdir(tasks):
                    with contextlib.suppress(OSError, ValueError):
                        ran[f"{tasks}/{name}"] = _ran_ns(f"{tasks}/{name}/schedstat")
        return ran


def _ran_ns(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _times(fd)[0]
    finally:
        os.close(fd)


def _times(schedstat: int) -> tuple[int, int, int]:
    """(ns ran, ns waited, slices)."""
    ran, waited, slices = os.pread(schedstat, _BYTES, 0).split()
    return int(ran), int(waited), int(slices)
