"""The board of one engine: what it is doing right now, and what an operator orders it to pretend.

    part      records  written by                         read by
    core      1        the engine core process            serving process, every tick
    workers   16       the worker process of each rank    serving process
    chaos     1        an operator (`zerolayer chaos`)    the engine

The file outlives restarts of its engine; the incarnation tells them apart.
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from zerolayer.arena.records import RecordFile, RecordShape
from zerolayer.core.errors import ConfigError

WORKERS_MAX: Final = 16

CHAOS_NONE: Final = 0
CHAOS_HANG: Final = 1
CHAOS_SLOW: Final = 2


class CoreState(msgspec.Struct, frozen=True, gc=False):
    """What an engine core says about itself; times are CLOCK_MONOTONIC nanoseconds."""

    incarnation: int = 0
    core_pid: int = 0
    step_seq: int = 0
    """Steps begun since the engine started."""
    step_started_ns: int = 0
    """0: idle."""
    step_ended_ns: int = 0
    prefill_tokens: int = 0
    """In the current step."""
    decode_requests: int = 0
    context_tokens: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    longest_free_run: int = 0
    """Largest number of free KV blocks side by side."""


class WorkerState(msgspec.Struct, frozen=True, gc=False):
    """What a worker process says about the snapshots that it saved and loaded."""

    pid: int = 0
    saved_bytes: int = 0
    """Copied out of the KV cache since the worker started."""
    loaded_bytes: int = 0
    """Copied into the KV cache since the worker started."""
    path_bytes_per_s: int = 0
    """What that path can do: measured when the arena was made; 0 without an arena."""


@dataclass(frozen=True, slots=True)
class ChaosOrder:
    """What an operator wants an engine to pretend."""

    mode: int = CHAOS_NONE
    """0 none, 1 hang, 2 slow."""
    factor: float = 1.0
    """How many times slower, for mode 2."""


class EngineBoard(RecordFile):
    """One engine's board. The file outlives restarts of its engine; the incarnation tells them
    apart.

    Three parts, each with its own writer: the core's state, one record per worker rank, and the
    operator's chaos order.
    """

    NAME = "engine_board"
    SHAPES = (
        (RecordShape([(name, "Q") for name in CoreState.__struct_fields__]), 1),
        (RecordShape([(name, "Q") for name in WorkerState.__struct_fields__]), WORKERS_MAX),
        (RecordShape([("factor", "d"), ("mode", "I")]), 1),
    )

    def write_core(self, state: CoreState) -> None:
        """The core's part; by the engine core process alone."""
        self._write(0, 0, msgspec.structs.astuple(state))

    def read_core(self) -> CoreState | None:
        """None before the engine wrote, or when it died while writing."""
        values = self._read(0, 0)
        return None if values is None else CoreState(*values)

    def write_worker(self, rank: int, state: WorkerState) -> None:
        """By the worker process of that rank, 0..15."""
        assert 0 <= rank < WORKERS_MAX
        self._write(1, rank, msgspec.structs.astuple(state))

    def read_worker(self, rank: int) -> WorkerState | None:
        """None before the worker of that rank wrote."""
        values = self._read(1, rank)
        return None if values is None else WorkerState(*values)

    def worker_pids(self) -> tuple[int, ...]:
        """Pids by rank, without ranks that never wrote."""
        rows = self._read_all(1)
        return tuple(int(row["pid"]) for row in rows if row["sequence"] and row["pid"])

    def order_chaos(self, order: ChaosOrder) -> None:
        """By the operator. Raises `ConfigError` when the order makes no sense."""
        if order.mode not in (CHAOS_NONE, CHAOS_HANG, CHAOS_SLOW):
            raise ConfigError("chaos_mode", order.mode, "give 0 (none), 1 (hang) or 2 (slow)")
        if not 1.0 <= order.factor <= 1000.0:
            raise ConfigError("chaos_factor", order.factor, "give a number from 1 to 1000")
        self._write(2, 0, (order.factor, order.mode))

    def read_chaos(self) -> ChaosOrder:
        """The order in force; none when nothing valid was written."""
        values = self._read(2, 0)
        if values is None or values[1] not in (CHAOS_HANG, CHAOS_SLOW):
            return ChaosOrder()
        factor = values[0]
        return ChaosOrder(values[1], factor if 1.0 <= factor <= 1000.0 else 1.0)

    def rows(self) -> list[dict[str, Any]]:
        """The whole board as one plain dict; empty before the engine wrote."""
        core = self.read_core()
        if core is None:
            return []
        chaos = self.read_chaos()
        row: dict[str, Any] = dict(msgspec.structs.asdict(core))
        row["worker_pids"] = " ".join(str(pid) for pid in self.worker_pids())
        row["chaos_mode"], row["chaos_factor"] = chaos.mode, chaos.factor
        return [row]
