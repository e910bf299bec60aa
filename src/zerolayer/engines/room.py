"""Whether more engines fit into this machine's memory, by what the running ones take."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = float(1 << 30)
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free, and that one more engine takes."""

    ram_free: int
    ram_each: int
    """Its own memory (pages that it shares with nobody) and its arena, which is memory too."""
    shm_free: int
    shm_each: int

    def lacks(self, engines: int) -> list[str]:
        """What `engines` more of them do not find, in words; empty when they fit."""
        lacking = []
        for what, free, each in (
            ("RAM", self.ram_free, self.ram_each),
            ("/dev/shm", self.shm_free, self.shm_each),
        ):
            if engines * each > free:
                lacking.append(
                    f"{engines} more engines need {engines * each / GIB:.1f} GiB of {what} "
                    f"and {free / GIB:.1f} GiB are free"
                )
        return lacking


def measure_room(engine_pids: list[tuple[int, ...]], arenas: list[Path], shm: Path) -> Room:
    """Look at the live engines (pids of each) and at their arena files. Takes some 100 ms."""
    own = [sum(_own_bytes(pid) for pid in pids) for pids in engine_pids]
    files: dict[str, int] = {}
    for path in arenas:
        engine = path.name.rsplit("-r", 1)[0]
        files[engine] = files.get(engine, 0) + (path.stat().st_size if path.exists() else 0)
    arena = max(files.values(), default=0)
    return Room(ram_free(), max(own, default=0) + arena, shutil.disk_usage(shm).free, arena)


def ram_free(cgroup: Path = _CGROUP) -> int:
    """Bytes that may still be used: of the machine, or of this container where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if most == "max":
        return free
    # Cached files are given back when memory is needed.
    return min(free, max(0, int(most) - used + int(stat.get("inactive_file", 0))))


def _own_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0
