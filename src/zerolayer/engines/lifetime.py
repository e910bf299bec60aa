"""How a child process lives: it dies with its parent, and starts without pushing others aside."""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies.

    The signal also ends a process that is stopped (SIGSTOP), which no watchdog inside it could.
    `expected_parent` closes the race with a parent that is already gone: then the process ends
    at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGKILL)


#: Niceness of an engine that starts: beside it, a serving engine gets ten times the CPU.
STARTING_NICE = 10


def may_set_aside() -> bool:
    """Whether this user may lower a priority and raise it again (root, or RLIMIT_NICE)."""
    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20


def start_aside() -> None:
    """Start this process at a low CPU priority, until `full_speed`.

    An engine that starts reads weights with every core it can get, while the others carry the
    streams of the one that it replaces.
    """
    if may_set_aside():
        os.setpriority(os.PRIO_PROCESS, 0, STARTING_NICE)


def set_aside(pids: Iterable[int]) -> None:
    """Give a stalled engine only CPU time that nobody else wants.

    What is left of it spins on vLLM's queues for a second (or for ever), on cores that the others
    need for its streams.
    """
    if may_set_aside():
        for thread in _threads(pids):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def full_speed(pids: Iterable[int]) -> None:
    """Give all threads of these processes the ordinary policy and priority."""
    if may_set_aside():
        for thread in _threads(pids):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, 0)


def _threads(pids: Iterable[int]) -> Iterator[int]:
    """All threads of these processes: Linux keeps policy and niceness per thread."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{pid}/task"))
