"""Faults on purpose: signals to an engine's processes, and orders on its board.

Works on the answer of `GET /zerolayer/status` of a fleet on this host.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

from zerolayer.arena.board import CHAOS_HANG, CHAOS_NONE, CHAOS_SLOW, ChaosOrder, EngineBoard
from zerolayer.arena.runtime_dir import RuntimeDir, list_instances
from zerolayer.core.errors import EngineError

ORDERS = {"none": CHAOS_NONE, "hang": CHAOS_HANG, "slow": CHAOS_SLOW}


def engine_row(status: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """One engine's row of the status. Raises `EngineError` when there is none of that name."""
    for row in status["engines"]:
        if row["id"] == engine:
            return dict(row)
    names = ", ".join(row["id"] for row in status["engines"])
    raise EngineError(f"this fleet has no engine {engine!r}; it has {names}")


def engine_pids(row: dict[str, Any]) -> list[int]:
    """The engine core and its workers; empty while it has no process."""
    pids = [row.get("core_pid"), *(row.get("worker_pids") or ())]
    return [int(pid) for pid in pids if pid]


def busiest_engine(status: dict[str, Any]) -> str | None:
    """The engine with the most streams; None when none has any."""
    rows = [row for row in status["engines"] if row["streams"] > 0 and engine_pids(row)]
    return max(rows, key=lambda row: row["streams"])["id"] if rows else None


def send(row: dict[str, Any], number: signal.Signals) -> int:
    """Signal all of an engine's processes; returns how many were there to get it."""
    sent = 0
    for pid in engine_pids(row):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent


def runtime_of(status: dict[str, Any]) -> RuntimeDir:
    """The runtime directory of that fleet. Raises `EngineError` when it is not on this host."""
    for instance in list_instances():
        if instance.instance == status["instance"]:
            return instance
    raise EngineError(
        f"the fleet {status['instance']} at {status['url']} does not run on this host for this "
        "user, so its engines cannot be disturbed from here"
    )


def order(runtime: RuntimeDir, slot: int, mode: str, factor: float = 1.0) -> None:
    """Order `none`, `hang` or `slow` on an engine's board. Raises `ConfigError`, `TableError`."""
    board = EngineBoard.open_writer(runtime.board_path(slot))
    try:
        board.order_chaos(ChaosOrder(ORDERS[mode], factor))
    finally:
        board.close()
