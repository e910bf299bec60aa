"""Shared memory that vLLM's own queues leave behind when an engine is killed.

vLLM names its segments through `multiprocessing.shared_memory` and removes them on an orderly end
only. A killed engine's segments are found in its memory map while it lives, and removed after it.
"""

import contextlib
from collections.abc import Iterable
from multiprocessing import shared_memory
from pathlib import Path

_SHM = "/dev/shm/"
#: What `multiprocessing.shared_memory` calls its segments on Linux; nothing else is touched.
_PREFIXES = ("psm_",)


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """Names of the anonymous segments that the processes have mapped; empty for gone ones."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.rpartition(_SHM)[2] if _SHM in line else ""
                if name.startswith(_PREFIXES) and not name.endswith("(deleted)"):
                    names.add(name)
    return sorted(names)


def remove_shared_memory(names: Iterable[str]) -> None:
    """Unlink segments, and tell the resource tracker that they are gone."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            segment = shared_memory.SharedMemory(name=name)
            segment.close()
            segment.unlink()
