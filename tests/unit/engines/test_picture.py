from pathlib import Path

import numpy as np
import pytest

from zerolayer.arena.board import CoreState, EngineBoard, WorkerState
from zerolayer.core.fleet_state import FleetState
from zerolayer.engines.picture import EVERY_NS, MemoryPicture

BLOCK_TOKENS = 32
SECOND_NS = 10**9


def core(free: int = 10, run: int = 4, pid: int = 7) -> CoreState:
    return CoreState(core_pid=pid, free_blocks=free, total_blocks=20, longest_free_run=run)


@pytest.fixture
def board(tmp_path: Path) -> EngineBoard:
    return EngineBoard.create(tmp_path / "b")


def test_the_picture_says_how_large_and_how_shattered_free_memory_is(board: EngineBoard) -> None:
    fleet = FleetState(1)
    MemoryPicture(fleet, [board]).look(0, core(), BLOCK_TOKENS, SECOND_NS)
    assert fleet.free_run_tokens[0] == 4 * 32
    assert fleet.fragmentation[0] == pytest.approx(0.6)
    assert fleet.link_use[0] == 0.0


def test_a_full_cache_is_not_shattered(board: EngineBoard) -> None:
    fleet = FleetState(1)
    MemoryPicture(fleet, [board]).look(0, core(0, 0), BLOCK_TOKENS, SECOND_NS)
    assert (fleet.free_run_tokens[0], fleet.fragmentation[0]) == (0.0, 0.0)


def test_a_picture_is_as_old_as_50_ms_at_most_and_not_made_more_often(board: EngineBoard) -> None:
    fleet = FleetState(1)
    picture = MemoryPicture(fleet, [board])
    picture.look(0, core(run=4), BLOCK_TOKENS, SECOND_NS)
    picture.look(0, core(run=5), BLOCK_TOKENS, SECOND_NS + EVERY_NS - 1)
    assert fleet.free_run_tokens[0] == 4 * 32
    picture.look(0, core(run=5), BLOCK_TOKENS, SECOND_NS + EVERY_NS)
    assert fleet.free_run_tokens[0] == 5 * 32
    picture.look(0, core(run=6, pid=8), BLOCK_TOKENS, SECOND_NS + EVERY_NS + 1)
    assert fleet.free_run_tokens[0] == 6 * 32, "a new engine in the slot is looked at at once"


def test_rates_come_to_what_is_really_moved_and_generated(board: EngineBoard) -> None:
    fleet = FleetState(1)
    picture = MemoryPicture(fleet, [board])
    for tick in range(200):
        now_ns = SECOND_NS + tick * EVERY_NS
        board.write_worker(0, WorkerState(9, 30_000 * tick, 20_000 * tick, 10_000_000))
        picture.generated(0, 2)
        picture.look(0, core(), BLOCK_TOKENS, now_ns)
    assert fleet.link_use[0] == pytest.approx(0.1, rel=0.01)  # 1 MB/s of 10 MB/s
    assert fleet.tokens_per_s[0] == pytest.approx(40.0, rel=0.01)


def test_counters_of_a_new_worker_do_not_make_negative_traffic(board: EngineBoard) -> None:
    fleet = FleetState(1)
    picture = MemoryPicture(fleet, [board])
    for tick, moved in enumerate((10**9, 0, 0)):
        board.write_worker(0, WorkerState(9, moved, 0, 10**9))
        picture.look(0, core(pid=7 + (tick > 0)), BLOCK_TOKENS, SECOND_NS * (1 + tick))
        assert fleet.link_use[0] == 0.0


def test_a_slot_that_was_added_later_is_followed_like_the_others(tmp_path: Path) -> None:
    fleet, boards = FleetState(1), [EngineBoard.create(tmp_path / "0")]
    picture = MemoryPicture(fleet, boards)
    fleet.resize(2)
    boards.append(EngineBoard.create(tmp_path / "1"))
    picture.look(1, core(), BLOCK_TOKENS, SECOND_NS)
    assert np.array_equal(fleet.free_run_tokens, [np.inf, 128.0])


def test_an_emptied_engine_has_no_picture() -> None:
    fleet = FleetState(1)
    fleet.free_run_tokens[0] = 3.0
    fleet.fragmentation[0] = 0.9
    fleet.emptied(0)
    assert (fleet.free_run_tokens[0], fleet.fragmentation[0]) == (np.inf, 0.0)
