"""Injected faults (`zerolayer chaos hang|slow`): they take hold inside an engine's step."""

import time
from pathlib import Path

from zerolayer.arena.board import CHAOS_HANG, CHAOS_SLOW, EngineBoard

#: How long a hanging engine spins between looks at the board, in seconds.
_LOOK_EVERY_S = 0.002


class FaultPoint:
    """Reads the operator's part of the engine's board in each step."""

    def __init__(self, board: Path) -> None:
        self._board = EngineBoard.open_reader(board)
        self._step_began = 0.0

    def step_began(self) -> None:
        """The step begins; vLLM starts loads only behind the forward pass where nothing loads."""
        self._step_began = time.perf_counter()

    def hang(self) -> None:
        """Spin for as long as a hang is injected, using the CPU like a busy engine would."""
        while self._board.read_chaos().mode == CHAOS_HANG:
            look_again = time.perf_counter() + _LOOK_EVERY_S
            while time.perf_counter() < look_again:
                pass

    def slow(self) -> None:
        """Stretch the step by the injected factor."""
        order = self._board.read_chaos()
        if order.mode == CHAOS_SLOW:
            time.sleep((time.perf_counter() - self._step_began) * (order.factor - 1))
