"""What the kernel says of an engine's processes: stopped, using a core, or waiting for one."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from zerolayer.engines.core_waits import CoreWaits

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 1024
#: Running, or waiting for a core (R) or for a disk (D): would go on by itself.
_WANTS_ON = (b"R", b"D")
_STATE, _UTIME, _STIME = 0, 11, 12  # fields of /proc/<pid>/stat behind the name


@dataclass(frozen=True, slots=True)
class TreeState:
    """A process tree at one moment."""

    stopped: bool  # a process is in state T
    runnable: bool  # a thread runs, or waits for a core or a disk
    cpu_ns: int  # user and system time so far; never falls
    waited_ns: int = 0  # time so far in which its computing threads waited for a core; never falls


class ProcessTree:
    """Reads /proc of a fixed set of processes through descriptors that stay open."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._fds = [os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC) for pid in pids]
        self._waits = CoreWaits(pids)
        self._cpu_ns = 0

    def look(self, now_ns: int, *, threads: bool) -> TreeState:
        """The tree now; `threads`: look at each thread's state, not only at the first one's."""
        stopped = runnable = False
        cpu_ns = 0
        for pid, fd in zip(self.pids, self._fds, strict=True):
            fields = _stat_fields(fd)
            if fields is None:
                continue
            state = fields[_STATE]
            # Not "t": a debugger that holds the engine for a moment is not a stop signal.
            stopped |= state == b"T"
            runnable |= state in _WANTS_ON or (threads and _has_runnable_thread(pid))
            cpu_ns += (int(fields[_UTIME]) + int(fields[_STIME])) * _NS_PER_TICK
        self._cpu_ns = max(self._cpu_ns, cpu_ns)
        return TreeState(stopped, runnable, self._cpu_ns, self._waits.look(now_ns))

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self._fds:
            os.close(fd)
        self._waits.close()
        self._fds = []
        self.pids = ()


def _stat_fields(fd: int) -> list[bytes] | None:
    """The fields behind the process name, which may itself hold spaces; None when it is gone."""
    try:
        raw = os.pread(fd, _STAT_BYTES, 0)
    except ProcessLookupError:
        return None
    return raw[raw.rfind(b")") + 2 :].split()


def _has_runnable_thread(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fd = os.open(f"/proc/{pid}/task/{thread}/stat", os.O_RDONLY)
                try:
                    fields = _stat_fields(fd)
                finally:
                    os.close(fd)
                if fields and fields[_STATE] in _WANTS_ON:
                    return True
    return False
