"""Files in shared memory and the memory behind them; the only user of mmap.

Every file is private: created with O_EXCL and mode 0600, opened with O_NOFOLLOW, and refused when
it is not a regular file of this user or open to others. So no other user can plant or read one.
"""

import contextlib
import mmap
import os
import platform
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from zerolayer.arena.layout import (
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    HEADER_READY,
    MEMORY_PAGE_BYTES,
    ArenaGeometry,
    ArenaHeader,
    decode_header,
    encode_header,
)
from zerolayer.core.errors import ArenaError, ArenaSpaceError

Bytes = NDArray[np.uint8]

# Linux 5.14; the mmap module has no names for them.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
# x86 keeps stores in order and loads in order; that is all the protocol asks for.
_ORDERED_MACHINE: Final = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()


def full_fence() -> None:
    """Nothing before it, load or store, is seen after anything behind it.

    Two rounds of a lock: what precedes is over at the first release, the second acquire comes after
    that release, and what follows comes after the acquire. Free on x86.
    """
    if _ORDERED_MACHINE:
        return
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def create_private_file(path: Path, file_bytes: int) -> int:
    """A new file of this size with all its memory allocated; returns its descriptor.

    Allocating here makes a full tmpfs an error now instead of a SIGBUS at some later store.
    Raises `ArenaSpaceError` (nothing is left behind) or `ArenaError`.
    """
    room = os.statvfs(path.parent)
    free_bytes = room.f_bavail * room.f_frsize
    if file_bytes > free_bytes:
        raise ArenaSpaceError(path, file_bytes, free_bytes)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as cause:
        raise ArenaError(f"cannot create {path}: {cause.strerror}") from cause
    try:
        os.posix_fallocate(fd, 0, file_bytes)
    except OSError as cause:
        os.close(fd)
        os.unlink(path)
        raise ArenaSpaceError(path, file_bytes, free_bytes) from cause
    return fd


def open_private_file(path: Path, *, writable: bool) -> tuple[int, int]:
    """Opens a file of ours; returns descriptor and size. Raises `ArenaError` when it is not
    ours."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as cause:
        raise ArenaError(f"cannot open {path}: {cause.strerror}") from cause
    status = os.fstat(fd)
    wrong = None
    if not stat.S_ISREG(status.st_mode):
        wrong = "not a regular file"
    elif status.st_uid != os.geteuid():
        wrong = f"owned by uid {status.st_uid}"
    elif status.st_mode & 0o077:
        wrong = f"open to others (mode {stat.S_IMODE(status.st_mode):o})"
    if wrong is not None:
        os.close(fd)
        raise ArenaError(f"refusing {path}: {wrong}")
    return fd, status.st_size


class MappedFile:
    """A file as memory: `memory` as bytes, `words` and `longs` as native u32 and u64.

    A store through `words` or `longs` is one store of the machine. Views handed out keep the
    mapping alive after `close`.
    """

    def __init__(self, path: Path, fd: int, file_bytes: int, *, writable: bool) -> None:
        self.path = path
        self.fd = fd
        self._give_back_fd = weakref.finalize(self, os.close, fd)
        self.writable = writable
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, file_bytes, access=access)
        whole = file_bytes - file_bytes % 8
        self.raw = memoryview(self._map)
        self.words = self.raw[:whole].cast("I")
        self.longs = self.raw[:whole].cast("Q")
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def prefault(self) -> None:
        """Maps every memory page now, so that the first use of each does not pay for it.

        About 0.1 s per GiB. Only for a file that nobody writes yet, or read-only.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ)
        except OSError:  # an older kernel: touch one byte of each memory page
            if self.writable:
                self.memory[::MEMORY_PAGE_BYTES] |= 0
            else:
                self.memory[::MEMORY_PAGE_BYTES].max()

    def whole(self) -> bool:
        """Whether the file still has the size that was mapped; beyond its end lies SIGBUS."""
        return os.fstat(self.fd).st_size >= len(self.raw)

    def close(self) -> None:
        """Gives the descriptor back, and the memory too unless someone still holds a view of it."""
        self.memory = np.empty(0, dtype=np.uint8)
        for view in (self.words, self.longs, self.raw):
            view.release()
        # A page view that lives on somewhere ends the mapping when it goes.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._give_back_fd()


class ArenaFile(MappedFile):
    """One arena file, mapped; made by `create`, opened by `open`."""

    def __init__(self, path: Path, fd: int, header: ArenaHeader, *, writable: bool) -> None:
        super().__init__(path, fd, header.geometry.file_bytes, writable=writable)
        self.header = header
        self.geometry = header.geometry

    @classmethod
    def create(cls, path: Path, geometry: ArenaGeometry, fingerprint: bytes) -> "ArenaFile":
        """A new, empty arena for its writer. `fingerprint`: 32 bytes.

        Raises `ArenaSpaceError` when the tmpfs has no room, `ArenaError` when the path is taken.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ArenaError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        generation = int.from_bytes(os.urandom(8), "little")
        header = ArenaHeader(geometry, generation, fingerprint)
        file = cls(path, create_private_file(path, geometry.file_bytes), header, writable=True)
        encoded = encode_header(header)
        file.raw[: len(encoded)] = encoded
        full_fence()
        file.words[HEADER_READY // 4] = 1
        return file

    @classmethod
    def open(cls, path: Path) -> "ArenaFile":
        """An existing arena, read-only, with its header checked. Raises `ArenaError`."""
        fd, file_bytes = open_private_file(path, writable=False)
        header = decode_header(os.pread(fd, HEADER_BYTES, 0), file_bytes)
        if isinstance(header, str):
            os.close(fd)
            raise ArenaError(f"refusing {path}: {header}")
        return cls(path, fd, header, writable=False)

    def page_view(self, page: int) -> Bytes:
        """The bytes of one page, [page_bytes] uint8; writable only for the writer."""
        assert 0 <= page < self.geometry.page_count
        offset = self.geometry.page_offset(page)
        return self.memory[offset : offset + self.geometry.page_bytes]

    def read_page(self, page: int, parts: Sequence[Any]) -> bool:
        """Copy one page into contiguous arrays one after the other; False when it ends early or
        cannot be read."""
        assert 0 <= page < self.geometry.page_count
        try:
            got = os.preadv(self.fd, parts, self.geometry.page_offset(page))
        except OSError:
            return False
        return got == self.geometry.page_bytes


class Mover(Protocol):
    """Where the writer's stores go: into local memory today, over a stream to a neighbour tomorrow.

    Offsets are those of the file, so the receiving side needs nothing but the same geometry. Calls
    take effect in order at each `commit`: all `put` and `scatter` before it are seen before its
    value, and nothing after it is seen earlier. A stream that delivers in order has this property.
    """

    def put(self, offset: int, data: NDArray[Any]) -> None:
        """Stores `data` (any strides; its C order counts) at `offset`."""

    def scatter(self, offset: int, row: NDArray[Any], index: NDArray[np.intp]) -> None:
        """Stores `row[l, i]` at element `index[i]` of layer `l` of the page at `offset`."""

    def put_word(self, offset: int, value: int) -> None:
        """Stores a u32."""

    def put_long(self, offset: int, value: int) -> None:
        """Stores a u64."""

    def commit(self, offset: int, value: int, width: int) -> None:
        """Stores `value` (`width` 4 or 8 bytes) between what came before and what comes after."""


class LocalMover:
    """The mover of one host: stores into the mapped file."""

    def __init__(self, file: ArenaFile) -> None:
        assert file.writable
        self._memory = file.memory
        self._words = file.words
        self._longs = file.longs
        self._page_bytes = file.geometry.page_bytes

    def put(self, offset: int, data: NDArray[Any]) -> None:
        """See `Mover`."""
        target = self._memory[offset : offset + data.nbytes].view(data.dtype)
        np.copyto(target.reshape(data.shape), data)

    def scatter(self, offset: int, row: NDArray[Any], index: NDArray[np.intp]) -> None:
        """See `Mover`."""
        page = self._memory[offset : offset + self._page_bytes].view(row.dtype)
        # Layer by layer takes half the time of one assignment over both axes (numpy 2.3).
        for layer, values in zip(page.reshape(row.shape[0], -1), row, strict=True):
            layer[index] = values

    def put_word(self, offset: int, value: int) -> None:
        """See `Mover`."""
        self._words[offset >> 2] = value

    def put_long(self, offset: int, value: int) -> None:
        """See `Mover`."""
        self._longs[offset >> 3] = value

    def commit(self, offset: int, value: int, width: int) -> None:
        """See `Mover`."""
        full_fence()
        if width == 8:
            self._longs[offset >> 3] = value
        else:
            self._words[offset >> 2] = value
        full_fence()
