import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zerolayer.arena.board import CoreState, EngineBoard
from zerolayer.engines.free_map import FreeMap, longest_run
from zerolayer.engines.progress import ProgressBoard
from zerolayer.engines.settings import ConnectorSettings


class Queue:
    """vLLM's list of free blocks, as far as it is followed; the real one is in the contract
    tests."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = blocks

    def popleft_n(self, n: int) -> list[Any]:
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        return taken

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def remove(self, block: Any) -> None:
        self.blocks.remove(block)

    def append(self, block: Any) -> None:
        self.blocks.append(block)

    def append_n(self, blocks: list[Any]) -> None:
        self.blocks += blocks

    def prepend_n(self, blocks: list[Any]) -> None:
        self.blocks = blocks + self.blocks


class Pool:
    """`count` blocks, of which the first is the null block."""

    def __init__(self, count: int) -> None:
        self.num_gpu_blocks = count
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0, is_null=i == 0) for i in range(count)]
        self.free_block_queue = Queue(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue.blocks)

    def take(self, n: int) -> list[Any]:
        taken = self.free_block_queue.popleft_n(n)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def give(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt = 0
        self.free_block_queue.append_n(blocks)


def brute(free: list[bool]) -> int:
    best = run = 0
    for one in free:
        run = run + 1 if one else 0
        best = max(best, run)
    return best


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
def test_the_longest_run_is_what_counting_gives(length: int) -> None:
    rng = random.Random(length)
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        free = [rng.random() < share for _ in range(length)]
        assert longest_run(np.array(free, dtype=np.bool_)) == brute(free)


def test_the_map_is_the_list_after_any_changes() -> None:
    pool = Pool(64)
    map_ = FreeMap(pool, lambda: None)
    rng = random.Random(5)
    held: list[list[Any]] = []
    for _ in range(300):
        if held and (rng.random() < 0.5 or pool.get_num_free_blocks() < 4):
            pool.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(pool.take(rng.randrange(4)))
        free = [block in pool.free_block_queue.blocks for block in pool.blocks]
        assert map_.longest_run() == brute(free)


def test_a_change_that_nobody_told_of_is_found_by_its_count() -> None:
    pool = Pool(16)
    map_ = FreeMap(pool, lambda: None)
    assert map_.longest_run() == 15
    block = pool.free_block_queue.blocks.pop(7)
    block.ref_cnt = 1
    assert map_.longest_run() == 7


@pytest.fixture
def board(tmp_path: Any) -> tuple[ProgressBoard, EngineBoard]:
    path = tmp_path / "board"
    shown = EngineBoard.create(path)
    return ProgressBoard(ConnectorSettings("e0", 1, str(tmp_path), str(path))), shown


def read(board: EngineBoard) -> CoreState:
    state = board.read_core()
    assert state is not None
    return state


def test_an_engine_shows_its_blocks_before_its_first_step(board: Any) -> None:
    progress, shown = board
    progress.bind_blocks(Pool(16))
    state = read(shown)
    assert (state.free_blocks, state.total_blocks, state.longest_free_run) == (15, 16, 15)


def test_blocks_that_come_back_while_nothing_runs_are_shown_at_once(board: Any) -> None:
    progress, shown = board
    pool = Pool(16)
    progress.bind_blocks(pool)
    held = pool.take(4)
    other = pool.take(1)
    pool.give(held)
    state = read(shown)
    assert (state.free_blocks, state.longest_free_run) == (14, 10)
    pool.give(other)
    assert read(shown).longest_free_run == 15


def step(tokens: int) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens={"r": tokens},
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[]), scheduled_new_reqs=[],
    )  # fmt: skip


def test_between_steps_the_run_is_looked_for_at_most_every_50_ms(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, shown = board
    now_ns = 10**12
    monkeypatch.setattr("zerolayer.engines.progress.time.monotonic_ns", lambda: now_ns)
    pool = Pool(16)
    progress.bind_blocks(pool)
    progress.added(SimpleNamespace(request_id="r"))
    pool.take(5)
    progress.step_started(step(3))
    assert read(shown).longest_free_run == 10
    pool.give(pool.take(10)[9:])
    progress.step_started(step(3))
    assert read(shown).longest_free_run == 1  # never more than there are free ones
    now_ns += 50_000_000
    pool.give(pool.blocks[1:4])
    progress.step_started(step(3))
    assert read(shown).longest_free_run == 3
