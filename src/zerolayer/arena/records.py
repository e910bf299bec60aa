"""Fixed records in a shared file, each with a sequence number: the mechanics under `tables`.

    0    64 bytes   header: magic 8s | version u32 | ready u32 | record bytes u32 | record count u32
                    | table name 16s
    64   records    0 sequence u64 (odd: being written; 0: never written) | the fields

Store order of a write, `>>` a full fence: sequence odd >> fields >> sequence even. A reader takes
the sequence, the fields, the sequence again; unequal or odd means try again. One writer per
record; a writer that died half-way leaves it odd, which reads as "nothing" until the next write.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from zerolayer.arena.mapping import (
    MappedFile,
    create_private_file,
    full_fence,
    open_private_file,
)
from zerolayer.core.errors import ArenaError, TableError

_MAGIC: Final = b"ZLTABLE\x00"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("=8sIIII16s")
_READY: Final = 12
_HEADER_BYTES: Final = 64
_TRIES: Final = 64

_Table = TypeVar("_Table", bound="RecordFile")


class RecordShape:
    """The fields of one record: one list gives both the packer and the array type.

    `fields`: (name, code) with a struct code of native size, the widest first so that no padding is
    needed; text is `<n>s`, UTF-8 and padded with zeros.
    """

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self.names = tuple(name for name, _ in fields)
        self.packer = struct.Struct("=" + "".join(code for _, code in fields))
        self.record_bytes = -(-(8 + self.packer.size) // 8) * 8
        types: list[tuple[str, Any]] = [("sequence", np.uint64)]
        types += [(name, _numpy_type(code)) for name, code in fields]
        if pad := self.record_bytes - 8 - self.packer.size:
            types.append(("pad", f"V{pad}"))
        self.dtype = np.dtype(types)
        assert self.dtype.itemsize == self.record_bytes


def _numpy_type(code: str) -> str:
    return "S" + code[:-1] if code.endswith("s") else code


class RecordFile:
    """A file of `count` records of one or more shapes laid end to end (`shapes[i]` for record i).

    Subclasses say `NAME`, `SHAPES`; a table of many equal records gives one shape and its count.
    """

    NAME: str
    SHAPES: tuple[tuple[RecordShape, int], ...]

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._bases: list[int] = []
        at = _HEADER_BYTES
        for shape, count in self.SHAPES:
            self._bases.append(at)
            at += shape.record_bytes * count

    @classmethod
    def create(cls: type[_Table], path: Path) -> _Table:
        """A new table, empty, writable. Raises `TableError` when the path is taken or space is
        out."""
        file_bytes = cls._file_bytes()
        try:
            fd = create_private_file(path, file_bytes)
        except ArenaError as cause:
            raise TableError(str(cause)) from cause
        file = MappedFile(path, fd, file_bytes, writable=True)
        header = cls._header(ready=0)
        file.raw[: len(header)] = header
        full_fence()
        file.words[_READY // 4] = 1
        return cls(file)

    @classmethod
    def open_reader(cls: type[_Table], path: Path) -> _Table:
        """An existing table, read-only. Raises `TableError`."""
        return cls._open(path, writable=False)

    @classmethod
    def open_writer(cls: type[_Table], path: Path) -> _Table:
        """An existing table, for the one writer of some of its records. Raises `TableError`."""
        return cls._open(path, writable=True)

    def close(self) -> None:
        """Unmaps the table; the file stays."""
        self._file.close()

    @classmethod
    def _open(cls: type[_Table], path: Path, *, writable: bool) -> _Table:
        try:
            fd, file_bytes = open_private_file(path, writable=writable)
        except ArenaError as cause:
            raise TableError(str(cause)) from cause
        header = os.pread(fd, _HEADER.size, 0)
        if header != cls._header(ready=1) or file_bytes != cls._file_bytes():
            os.close(fd)
            raise TableError(f"refusing {path}: not a {cls.NAME} table of this version")
        return cls(MappedFile(path, fd, file_bytes, writable=writable))

    @classmethod
    def _file_bytes(cls) -> int:
        return _HEADER_BYTES + sum(shape.record_bytes * count for shape, count in cls.SHAPES)

    @classmethod
    def _header(cls, *, ready: int) -> bytes:
        total = sum(count for _, count in cls.SHAPES)
        record_bytes = sum(shape.record_bytes for shape, _ in cls.SHAPES)
        name = cls.NAME.encode()[:16]
        return _HEADER.pack(_MAGIC, _VERSION, ready, record_bytes, total, name)

    def _write(self, part: int, index: int, values: tuple[Any, ...]) -> None:
        shape = self.SHAPES[part][0]
        at = self._bases[part] + index * shape.record_bytes
        longs = self._file.longs
        sequence = longs[at >> 3] | 1
        longs[at >> 3] = sequence
        full_fence()
        shape.packer.pack_into(self._file.raw, at + 8, *values)
        full_fence()
        longs[at >> 3] = (sequence + 1) & 0xFFFF_FFFF_FFFF_FFFF

    def _read(self, part: int, index: int) -> tuple[Any, ...] | None:
        """The fields of one record; None: never written, or not at rest in 64 tries."""
        shape = self.SHAPES[part][0]
        at = self._bases[part] + index * shape.record_bytes
        longs, raw = self._file.longs, self._file.raw
        if not self._file.whole():
            return None
        for _ in range(_TRIES):
            sequence = longs[at >> 3]
            if sequence == 0:
                return None
            full_fence()
            values = shape.packer.unpack_from(raw, at + 8)
            full_fence()
            if sequence % 2 == 0 and longs[at >> 3] == sequence:
                return values
        return None

    def _read_all(self, part: int) -> NDArray[Any]:
        """A copy of all records of one shape; those that were not at rest have sequence 0."""
        shape, count = self.SHAPES[part]
        if not self._file.whole():
            return np.zeros(count, dtype=shape.dtype)
        base = self._bases[part]
        shared = self._file.memory[base : base + count * shape.record_bytes].view(shape.dtype)
        before = shared["sequence"].copy()
        full_fence()
        rows = shared.copy()
        full_fence()
        torn = (before % 2 == 1) | (before != shared["sequence"])
        rows["sequence"] = np.where(torn, 0, before)
        return rows


def text_field(value: str, size: int) -> bytes:
    """UTF-8 cut to `size` bytes at a character's edge."""
    raw = value.encode()
    return raw if len(raw) <= size else raw[:size].decode(errors="ignore").encode()


def read_text(raw: bytes) -> str:
    """The text of a field, without its padding; bytes that are no UTF-8 show as replacement."""
    return raw.rstrip(b"\0").decode(errors="replace")
