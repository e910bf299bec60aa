from pathlib import Path
from typing import Any

import numpy as np

from zerolayer.arena.board import EngineBoard, WorkerState
from zerolayer.engines.traffic import MEASURED_BYTES, SnapshotTraffic, path_bytes_per_s


class Kv:
    """Blocks of 2 layers with 1024 elements of 4 bytes: 8 KiB each."""

    layers, block_elements, itemsize = 2, 1024, 4

    def __init__(self) -> None:
        self.read = 0

    def read_block(self, block: int) -> Any:
        self.read += 1
        return np.zeros((2, 1024), dtype=np.uint32)


def test_a_workers_board_shows_its_bytes_at_the_end_of_each_step(tmp_path: Path) -> None:
    board = EngineBoard.create(tmp_path / "b")
    traffic = SnapshotTraffic(tmp_path / "b", 1, 2e9)
    first = board.read_worker(1)
    assert first is not None
    assert first == WorkerState(first.pid, 0, 0, 2_000_000_000)
    traffic.saved(100)
    traffic.loaded(30)
    assert board.read_worker(1) == first
    traffic.show()
    assert board.read_worker(1) == WorkerState(first.pid, 100, 30, 2_000_000_000)


def test_a_worker_beyond_the_boards_ranks_counts_for_itself(tmp_path: Path) -> None:
    EngineBoard.create(tmp_path / "b")
    SnapshotTraffic(tmp_path / "b", 99).show()


def test_the_paths_speed_is_the_best_of_three_counts_over_whole_blocks() -> None:
    times = iter([0.0, 4.0, 4.0, 5.0, 5.0, 7.0])
    kv = Kv()
    speed = path_bytes_per_s(kv, 10_000, lambda: next(times))  # type: ignore[arg-type]
    assert speed == MEASURED_BYTES / 1.0
    assert kv.read == 3 * MEASURED_BYTES // 8192


def test_a_cache_of_few_blocks_is_measured_on_those() -> None:
    times = iter(range(6))
    kv = Kv()
    assert path_bytes_per_s(kv, 2, lambda: next(times)) == 2 * 8192  # type: ignore[arg-type]
