"""The private directory in shared memory that holds everything of one serving process.

    <shm>/zerolayer-<uid>/            0700, ours; its flock serialises creation and reclaiming
        <instance>/                   0700, 16 random hex digits
            instance.json             who made it; its flock is held while that process lives
            arena-e0-1-r0.kv          engine 0, incarnation 1, tensor-parallel rank 0
            tmp-e0-1/  tmp-serve/         temporary files and sockets of one process
            board-e0.tbl  load_heatmap.tbl  kv_snapshot_meta.tbl  stall_detect_cfg.tbl

The serving process creates and removes it. After a crash the next start removes what is left: an
instance whose lock is free and whose process is gone. Both are asked, because a pid says nothing
across containers that share /dev/shm, and a lock may have been inherited by a child that lives on.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from zerolayer.core.errors import RuntimeDirError

SHM: Final = Path("/dev/shm")
INFO_NAME: Final = "instance.json"
_INFO_BYTES_MAX: Final = 64 * 1024
_INSTANCE_DIGITS: Final = 16


class InstanceInfo(msgspec.Struct, frozen=True):
    """What `instance.json` says."""

    pid: int
    pid_start_ticks: int
    """Start time of that process in clock ticks since boot; tells a reused pid apart."""
    url: str
    model: str
    started: float
    """Unix seconds."""


class RuntimeDir:
    """One instance's directory; `create` makes and owns it, `open` only looks at one."""

    def __init__(self, path: Path, info: InstanceInfo, lock_fd: int = -1) -> None:
        self.path = path
        self.instance = path.name
        self.info = info
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, *, url: str, model: str, started_unix: float, shm: Path = SHM) -> "RuntimeDir":
        """A new directory for this process. Raises `RuntimeDirError` where that is not safe."""
        info = InstanceInfo(
            os.getpid(), process_start_ticks(os.getpid()) or 0, url, model, started_unix
        )
        with _new_base_lock(shm) as base:
            path = base / secrets.token_hex(_INSTANCE_DIGITS // 2)
            path.mkdir(mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            lock_fd = os.open(path / INFO_NAME, flags, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock_fd, msgspec.json.encode(info))
        return cls(path, info, lock_fd)

    @classmethod
    def open(cls, path: Path) -> "RuntimeDir":
        """An existing instance, without owning it. Raises `RuntimeDirError`."""
        _check_private(path)
        info = _read_info(path)
        if info is None:
            raise RuntimeDirError(f"{path} has no readable {INFO_NAME}")
        return cls(path, info)

    @property
    def alive(self) -> bool:
        """Whether the process that made it still runs."""
        return not _left_over(self.path)

    def arena_path(self, engine: int, incarnation: int, rank: int) -> Path:
        """Where that engine process keeps its KV pages."""
        return self.path / f"arena-e{engine}-{incarnation}-r{rank}.kv"

    def scratch_path(self, process: str) -> Path:
        """Where that process has temporary files and sockets, which it leaves when it is killed."""
        return self.path / f"tmp-{process}"

    def board_path(self, engine: int) -> Path:
        """Where that engine publishes its steps."""
        return self.path / f"board-e{engine}.tbl"

    def table_path(self, name: str) -> Path:
        """Where the table `load_heatmap`, `kv_snapshot_meta` or `stall_detect_cfg` lies."""
        return self.path / f"{name}.tbl"

    def files(self) -> list[Path]:
        """All files in it, sorted by name."""
        return sorted(entry for entry in self.path.iterdir() if entry.is_file())

    def remove(self) -> None:
        """Unlinks everything, and with the last instance the directory above; whoever has a file
        mapped keeps its memory until it unmaps."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError), _base_lock(self.path.parent) as base_fd:
            _remove_if_empty(self.path.parent, base_fd)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def list_instances(shm: Path = SHM) -> list[RuntimeDir]:
    """This user's instances that run now, oldest first; empty when there is no directory at all."""
    base = _base_path(shm)
    if _is_gone(base):
        return []
    found = []
    for path in _instance_paths(base):
        info = _read_info(path)
        if info is not None and not _left_over(path):
            found.append(RuntimeDir(path, info))
    return sorted(found, key=lambda instance: instance.info.started)


def reclaim(shm: Path = SHM) -> list[str]:
    """Removes what dead instances left and returns their names. Never touches a running one."""
    base = _base_path(shm)
    gone: list[str] = []
    if _is_gone(base):
        return gone
    # Another process may remove the directory with its own last instance at any moment.
    with contextlib.suppress(FileNotFoundError), _base_lock(base) as base_fd:
        for path in _instance_paths(base):
            if _left_over(path):
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path.name)
        _remove_if_empty(base, base_fd)
    return gone


def process_start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; None when there is no such process (or it is a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The second field is the command in parentheses and may hold anything, parentheses too.
    fields = text[text.rfind(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _base_path(shm: Path) -> Path:
    return shm / f"zerolayer-{os.geteuid()}"


def _ensure_base(shm: Path) -> Path:
    base = _base_path(shm)
    try:
        with contextlib.suppress(FileExistsError):  # what is there is checked by the caller
            base.mkdir(mode=0o700)
    except OSError as cause:
        raise RuntimeDirError(f"cannot create {base}: {cause.strerror}") from cause
    return base


def _check_private(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError as cause:
        raise RuntimeDirError(f"cannot look at {path}: {cause.strerror}") from cause
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimeDirError(f"refusing {path}: not a directory (a symlink counts as none)")
    if status.st_uid != os.geteuid():
        raise RuntimeDirError(f"refusing {path}: owned by uid {status.st_uid}")
    if status.st_mode & 0o077:
        raise RuntimeDirError(
            f"refusing {path}: open to others (mode {stat.S_IMODE(status.st_mode):o}); chmod 700 it"
        )


@contextmanager
def _new_base_lock(shm: Path) -> Iterator[Path]:
    """The user's directory, made if need be and locked. Until it is locked, another process may
    remove it with its own last instance."""
    with contextlib.ExitStack() as held:
        while True:
            base = _ensure_base(shm)
            if _is_gone(base):
                continue
            with contextlib.suppress(FileNotFoundError):
                fd = held.enter_context(_base_lock(base))
                if os.path.samestat(os.fstat(fd), base.lstat()):
                    break
        yield base


def _remove_if_empty(base: Path, lock_fd: int) -> None:
    """With the lock held on this very directory, so that nobody is about to make an instance in
    it."""
    with contextlib.suppress(OSError):  # another instance is in it, or it is gone
        if os.path.samestat(os.fstat(lock_fd), base.lstat()):
            base.rmdir()


def _is_gone(base: Path) -> bool:
    """Whether there is no such directory (any more); raises `RuntimeDirError` for one that is not
    safely ours."""
    try:
        _check_private(base)
    except RuntimeDirError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return True
        raise
    return False


@contextmanager
def _base_lock(base: Path) -> Iterator[int]:
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _instance_paths(base: Path) -> list[Path]:
    # Only names that we make: whatever else lies there is not ours to remove.
    def ours(path: Path) -> bool:
        digits = len(path.name) == _INSTANCE_DIGITS and set(path.name) <= set("0123456789abcdef")
        return digits and path.is_dir() and not path.is_symlink()

    try:
        return sorted(path for path in base.iterdir() if ours(path))
    except FileNotFoundError:
        return []


def _read_info(path: Path) -> InstanceInfo | None:
    try:
        fd = os.open(path / INFO_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(fd, _INFO_BYTES_MAX), type=InstanceInfo)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(fd)


def _left_over(path: Path) -> bool:
    try:
        fd = os.open(path / INFO_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    info = _read_info(path)
    return info is None or process_start_ticks(info.pid) != info.pid_start_ticks
