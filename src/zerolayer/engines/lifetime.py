"""How a child process lives: it dies with its parent, and starts without pushing others aside."""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterable

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


#: Niceness of an engine that is still starting: beside it, a serving engine gets ten times the CPU.
STARTING_NICE = 10


def start_quietly() -> None:
    """Take a low CPU priority until `full_speed`, where this user may raise it again afterwards.

    An engine that starts reads weights with every core it can get, while the others carry the
    streams of the one that it replaces.
    """
    may_raise = os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20
    if may_raise:
        os.setpriority(os.PRIO_PROCESS, 0, STARTING_NICE)


def full_speed(pids: Iterable[int]) -> None:
    """Give all threads of these processes the ordinary priority (Linux: niceness is per thread)."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), 0)
