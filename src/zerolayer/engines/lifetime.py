"""Ties a child's life to its parent's (Linux `prctl(PR_SET_PDEATHSIG)`)."""

import ctypes
import os
import signal

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
