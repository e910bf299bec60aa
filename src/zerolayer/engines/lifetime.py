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


def end_if_orphaned(fleet_pid: int) -> None:
    """End an engine whose fork server or serving process was gone before it could tie itself to it.

    An engine's parent is never the init process, unless it was handed over as an orphan.
    """
    if os.getppid() == 1 or not os.path.exists(f"/proc/{fleet_pid}"):
        os.kill(os.getpid(), signal.SIGKILL)


#: Niceness of an engine that starts: beside it, a serving engine gets ten times the CPU.
STARTING_NICE = 10
#: Niceness of a stalled engine: a serving engine gets seventy times the CPU.
STALLED_NICE = 19


def may_renice() -> bool:
    """Whether this user may lower a priority and raise it again (root, or RLIMIT_NICE)."""
    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20


def renice(pids: Iterable[int], niceness: int) -> None:
    """Set the CPU priority of an engine's processes, 0 (ordinary) to 19 (lowest).

    An engine that starts reads weights with every core it can get, and what is left of a stalled
    one spins on vLLM's queues, while the others carry their streams. Does nothing for a user who
    could not undo it.
    """
    if may_renice():
        _set_niceness(pids, niceness)


def let_die_quietly(pids: Iterable[int]) -> None:
    """Low priority for processes that are ending, for whoever ended them.

    To take back some gigabytes costs the kernel tenths of a second, in the name of the process that
    dies: time in which the engine that got its streams should have the cores. Not the lowest, as
    the next incarnation waits for it.
    """
    _set_niceness(pids, STARTING_NICE)


def _set_niceness(pids: Iterable[int], niceness: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
