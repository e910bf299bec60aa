"""How many snapshot bytes a worker moves, beside what the path between cache and arena can do.

The path is what snapshots really take: out of the KV cache (over PCIe where that lies on a device)
and into shared memory. Its speed is measured once, on whole blocks, when the arena is made; vLLM's
own use of the link is not seen. So the share says how near snapshots are to the path's limit, and
no more.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from zerolayer.arena.board import WORKERS_MAX, EngineBoard, WorkerState
from zerolayer.engines.kv_access import KvAccess

#: Bytes of one measurement: some milliseconds at memory speed.
MEASURED_BYTES = 8 << 20
#: The best of so many counts: other engines may be starting on the same cores.
MEASURED_TIMES = 3


class SnapshotTraffic:
    """Counts one worker's snapshot bytes and shows them on the engine's board."""

    def __init__(self, board: Path, rank: int, path_bytes_per_s: float = 0.0) -> None:
        self._board = EngineBoard.open_writer(board)
        self._rank = rank
        self._pid = os.getpid()
        self._path_bytes_per_s = int(path_bytes_per_s)
        self._saved = self._loaded = 0
        self._shown = -1
        self.show()

    def saved(self, bytes_: int) -> None:
        """So many bytes went into the arena."""
        self._saved += bytes_

    def loaded(self, bytes_: int) -> None:
        """So many bytes came out of an arena."""
        self._loaded += bytes_

    def show(self) -> None:
        """Put the counts on the board; called once a step."""
        total = self._saved + self._loaded
        if total == self._shown or self._rank >= WORKERS_MAX:
            return
        self._shown = total
        self._board.write_worker(
            self._rank, WorkerState(self._pid, self._saved, self._loaded, self._path_bytes_per_s)
        )


def path_bytes_per_s(
    kv: KvAccess, blocks: int, clock_s: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second from the KV cache into this process's memory, on `blocks` whole blocks.

    The arena itself is shared memory of the same machine: its second copy is in the figure.
    """
    block_bytes = kv.layers * kv.block_elements * kv.itemsize
    count = max(1, min(blocks, MEASURED_BYTES // block_bytes))
    scratch = np.empty((kv.layers, kv.block_elements), dtype=f"u{kv.itemsize}")
    best = 0.0
    for _ in range(MEASURED_TIMES):
        began = clock_s()
        for block in range(count):
            np.copyto(scratch, kv.read_block(block))
        best = max(best, count * block_bytes / max(1e-9, clock_s() - began))
    return best
