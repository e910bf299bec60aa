"""How far a step is from what its work costs."""

from dataclasses import dataclass
from math import log
from random import Random

FACTOR_MIN = 0.25
"""However large the deviation, no step takes less than this share of what its work costs."""
_DRAWS = 509


@dataclass(frozen=True, slots=True)
class NoiseLevel:
    """Noise of steps (`data/fault-model.md`, sections 5 and 7)."""

    deviation: float
    """Standard deviation of one step, as a share of it."""
    slow_share: float = 0.0
    """Share of steps that take 1.5 to 2 times as long."""


class StepNoise:
    """Noise of one engine's steps, from its own random stream."""

    __slots__ = ("_draws", "_level", "_next", "_rng", "_slow_in")

    def __init__(self, level: NoiseLevel, rng: Random) -> None:
        self._level = level
        self._rng = rng
        self._draws = [rng.gauss(0.0, level.deviation) for _ in range(_DRAWS)]
        self._next = 0
        self._slow_in = self._until_slow()

    def stretch(self, steps: int) -> tuple[float, int]:
        """(factor, steps): how much longer than nominal the next steps take, of which there are at
        most as many as asked for. A slow step stands alone."""
        if self._slow_in == 0:
            self._slow_in = self._until_slow()
            return self._rng.uniform(1.5, 2.0), 1
        if steps > self._slow_in:
            steps = self._slow_in
        self._slow_in -= steps
        self._next = (self._next + 1) % _DRAWS
        draw = self._draws[self._next]
        # The mean of k independent steps varies by 1/sqrt(k) of what one does.
        factor = 1.0 + (draw if steps == 1 else draw * steps**-0.5)
        return max(FACTOR_MIN, factor), steps

    def _until_slow(self) -> int:
        """Whole steps before the next slow one: geometric."""
        share = self._level.slow_share
        if share <= 0.0:
            return 1 << 62
        return int(log(1.0 - self._rng.random()) / log(1.0 - share))
