"""The shared tables that anyone on the host may read while a fleet runs (`zerolayer maps dump`).

    table              rows    written by                      read by
    load_heatmap       256     serving process, per row        operators, other serving processes
    kv_snapshot_meta   65,536  serving process, LRU            operators
    stall_detect_cfg   1       operators (under a file lock)   serving process, every tick
    engine_board       see `board`

Each record carries its own sequence number (`records`), so a reader sees a whole record or none.
Writers need a few microseconds and never wait.
"""

import fcntl
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from zerolayer.arena.board import EngineBoard
from zerolayer.arena.mapping import MappedFile
from zerolayer.arena.records import RecordFile, RecordShape, read_text, text_field
from zerolayer.core.errors import ConfigError, TableError
from zerolayer.core.fleet_state import HORIZON_S

_STREAM_ID_BYTES: Final = 64
_NAME_BYTES: Final = 32
HEATMAP_ROWS: Final = 256
SNAPSHOT_ROWS: Final = 65_536
_SECONDS: Final = range(1, HORIZON_S + 1)


# -- load_heatmap ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One engine's load."""

    engine: str
    entropy_score: float
    """Its share of the objective of its domain, as `dispatch.heat` defines it: 0 in an even
    fleet."""
    active_requests: int
    memory_percent: float
    """Of its KV cache, in use now."""
    updated: float
    """Unix seconds."""
    util_percent_next_5s: tuple[float, ...] = (0.0,) * HORIZON_S
    """Expected utilisation in each of the next seconds; above 100 a queue grows."""
    memory_percent_next_5s: tuple[float, ...] = (0.0,) * HORIZON_S
    """Expected share of its KV cache in use."""


class LoadHeatmap(RecordFile):
    """One row per slot of the fleet."""

    NAME = "load_heatmap"
    SHAPES = (
        (
            RecordShape(
                [
                    ("entropy_score", "d"),
                    ("memory_percent", "d"),
                    ("updated", "d"),
                    *((f"util_{second}", "d") for second in _SECONDS),
                    *((f"memory_{second}", "d") for second in _SECONDS),
                    ("active_requests", "I"),
                    ("engine", f"{_NAME_BYTES}s"),
                ]
            ),
            HEATMAP_ROWS,
        ),
    )

    def write(self, slot: int, row: LoadRow) -> None:
        """Sets the row of slot 0..255."""
        assert 0 <= slot < HEATMAP_ROWS
        name = text_field(row.engine, _NAME_BYTES)
        assert len(row.util_percent_next_5s) == len(row.memory_percent_next_5s) == HORIZON_S
        values = (
            row.entropy_score, row.memory_percent, row.updated, *row.util_percent_next_5s,
            *row.memory_percent_next_5s, row.active_requests, name,
        )  # fmt: skip
        self._write(0, slot, values)

    def clear(self, slot: int) -> None:
        """Empties a row: the engine is gone."""
        self.write(slot, LoadRow("", 0.0, 0, 0.0, 0.0))

    def rows(self) -> list[LoadRow]:
        """All rows that name an engine, in slot order."""
        return [
            LoadRow(
                read_text(row["engine"]),
                float(row["entropy_score"]),
                int(row["active_requests"]),
                float(row["memory_percent"]),
                float(row["updated"]),
                tuple(float(row[f"util_{second}"]) for second in _SECONDS),
                tuple(float(row[f"memory_{second}"]) for second in _SECONDS),
            )
            for row in self._read_all(0)
            if row["sequence"] and row["engine"]
        ]


# -- kv_snapshot_meta -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """Where the KV of one stream is kept."""

    stream: str
    """At most 64 bytes of UTF-8; longer ids are cut."""
    source: str
    """The engine that writes it."""
    destination_1: str
    """Where the copy lies: on one host the arena file of the engine."""
    destination_2: str
    """A second host; empty on one host."""
    updated: float
    """Unix seconds."""
    bytes_written: int
    committed_tokens: int


class KvSnapshotMeta(RecordFile):
    """The 65,536 streams that were touched last; the one that was not for longest gives its row.

    One writing object per file: the order of use is kept beside the table, in its process.
    """

    NAME = "kv_snapshot_meta"
    SHAPES = (
        (
            RecordShape(
                [
                    ("updated", "d"),
                    ("bytes_written", "Q"),
                    ("committed_tokens", "Q"),
                    ("stream", f"{_STREAM_ID_BYTES}s"),
                    ("source", f"{_NAME_BYTES}s"),
                    ("destination_1", f"{_NAME_BYTES}s"),
                    ("destination_2", f"{_NAME_BYTES}s"),
                ]
            ),
            SNAPSHOT_ROWS,
        ),
    )

    def __init__(self, file: MappedFile) -> None:
        super().__init__(file)
        self._used: OrderedDict[str, int] = OrderedDict()
        self._unused: list[int] = []
        self._next = 0

    def write(self, row: SnapshotRow) -> None:
        """Sets the row of `row.stream` and makes it the most recent."""
        index = self._used.get(row.stream)
        if index is None:
            index = self._take_row()
            self._used[row.stream] = index
        else:
            self._used.move_to_end(row.stream)
        values = (
            row.updated,
            row.bytes_written,
            row.committed_tokens,
            text_field(row.stream, _STREAM_ID_BYTES),
            text_field(row.source, _NAME_BYTES),
            text_field(row.destination_1, _NAME_BYTES),
            text_field(row.destination_2, _NAME_BYTES),
        )
        self._write(0, index, values)

    def remove(self, stream: str) -> None:
        """Empties the row of a stream, if it has one."""
        index = self._used.pop(stream, None)
        if index is not None:
            self._write(0, index, (0.0, 0, 0, b"", b"", b"", b""))
            self._unused.append(index)

    def rows(self) -> list[SnapshotRow]:
        """All streams in the table, most recently updated first."""
        found = self._read_all(0)
        found = found[(found["sequence"] != 0) & (found["stream"] != b"")]
        found = found[np.argsort(-found["updated"], kind="stable")]
        return [
            SnapshotRow(
                read_text(row["stream"]),
                read_text(row["source"]),
                read_text(row["destination_1"]),
                read_text(row["destination_2"]),
                float(row["updated"]),
                int(row["bytes_written"]),
                int(row["committed_tokens"]),
            )
            for row in found
        ]

    def _take_row(self) -> int:
        if self._unused:
            return self._unused.pop()
        if self._next < SNAPSHOT_ROWS:
            self._next += 1
            return self._next - 1
        return self._used.popitem(last=False)[1]


# -- stall_detect_cfg -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StallSettings:
    """What an operator may change while the fleet runs. Raises `ConfigError` out of range."""

    threshold_ms: float = 80.0
    """A step this much over its expected time makes an engine suspect. 1 to 60,000."""
    consecutive_failures: int = 3
    """Times the adaptive bound must be passed before streams are moved. 1 to 100."""
    adaptive_factor: float = 4.0
    """The bound is this many times the engine's own usual deviation. 1 to 100."""
    moves_per_minute_max: int = 600
    """Streams moved in any minute; above it only engines whose process is gone. 0 to 1,000,000."""
    restart_after_s: float = 30.0
    """A stalled engine that proves no progress for so long is restarted. 1 to 86,400."""

    def __post_init__(self) -> None:
        for name, (least, most) in _STALL_RANGES.items():
            value = getattr(self, name)
            whole = name in ("consecutive_failures", "moves_per_minute_max")
            wanted = f"give a {'whole ' if whole else ''}number from {least:g} to {most:g}"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ConfigError(name, value, wanted)
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigError(name, value, wanted)


_STALL_RANGES: Final = {
    "threshold_ms": (1.0, 60_000.0),
    "consecutive_failures": (1, 100),
    "adaptive_factor": (1.0, 100.0),
    "moves_per_minute_max": (0, 1_000_000),
    "restart_after_s": (1.0, 86_400.0),
}


class StallDetectCfg(RecordFile):
    """One row of `StallSettings`; a new table holds the defaults after `write(StallSettings())`."""

    NAME = "stall_detect_cfg"
    SHAPES = (
        (
            RecordShape(
                [
                    ("threshold_ms", "d"),
                    ("adaptive_factor", "d"),
                    ("restart_after_s", "d"),
                    ("consecutive_failures", "I"),
                    ("moves_per_minute_max", "I"),
                ]
            ),
            1,
        ),
    )

    def write(self, settings: StallSettings) -> None:
        """Replaces the row. Two operators at once take turns."""
        with self._locked():
            self._store(settings)

    def update(self, changes: dict[str, object]) -> StallSettings:
        """Changes some fields and returns the whole row.

        Raises `ConfigError` naming the field; then nothing was changed.
        """
        known = [field.name for field in fields(StallSettings)]
        for name in changes:
            if name not in known:
                fix = f"no such setting; known: {', '.join(known)}"
                raise ConfigError(name, changes[name], fix)
        with self._locked():
            before = asdict(self.read() or StallSettings())
            settings = StallSettings(**{**before, **changes})
            self._store(settings)
        return settings

    def read(self) -> StallSettings | None:
        """The row; None when it was never written or holds what could not be valid."""
        values = self._read(0, 0)
        if values is None:
            return None
        threshold_ms, adaptive_factor, restart_after_s, failures, moves = values
        try:
            return StallSettings(threshold_ms, failures, adaptive_factor, moves, restart_after_s)
        except ConfigError:
            return None

    def _store(self, row: StallSettings) -> None:
        self._write(
            0, 0,
            (
                row.threshold_ms, row.adaptive_factor, row.restart_after_s,
                row.consecutive_failures, row.moves_per_minute_max,
            ),
        )  # fmt: skip

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)


# -- for people -----------------------------------------------------------------------------

DUMPABLE: Final = ("load_heatmap", "kv_snapshot_meta", "stall_detect_cfg")


def dump(name: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a table file as plain dicts, for text or JSON: text, numbers, lists of numbers.

    `name`: one of `DUMPABLE`, or `engine_board`. Raises `TableError`.
    """
    if name == "load_heatmap":
        with closing(LoadHeatmap.open_reader(path)) as heatmap:
            return [
                {name: list(value) if isinstance(value, tuple) else value for name, value in row}
                for row in (asdict(row).items() for row in heatmap.rows())
            ]
    if name == "kv_snapshot_meta":
        with closing(KvSnapshotMeta.open_reader(path)) as snapshots:
            return [asdict(row) for row in snapshots.rows()]
    if name == "stall_detect_cfg":
        with closing(StallDetectCfg.open_reader(path)) as table:
            settings = table.read()
            return [] if settings is None else [asdict(settings)]
    if name == "engine_board":
        with closing(EngineBoard.open_reader(path)) as board:
            return board.rows()
    raise TableError(f"no table {name!r}; known: {', '.join(DUMPABLE)}, engine_board")
