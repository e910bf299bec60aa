"""The drain rule (P7): an engine that is hot gets new work only when no other can have it.

Hot: GPU utilisation over 92 % and memory over 95 % in three samples in a row. It ends when one of
the two has been under its lower mark for as many samples in a row, so that an engine at the edge
does not come and go. Origin: the source (mission, P7).

GPU utilisation is the hardware's count where there is one (`fleet.gpu_busy`: the share of time in
which any kernel ran, as the source means it), our own utilisation otherwise. Memory is the share of
KV blocks in use: device memory says nothing, as vLLM takes it all at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerolayer.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DrainThresholds:
    """Shares between 0 and 1. Raises ConfigError where a lower mark is not below its upper one."""

    util_over: float = 0.92
    mem_over: float = 0.95
    samples: int = 3
    """In a row, to become hot and to stop being it."""
    util_under: float = 0.85
    """Lower mark of utilisation."""
    mem_under: float = 0.88
    """Lower mark of memory."""

    def __post_init__(self) -> None:
        for field in ("util", "mem"):
            over, under = getattr(self, f"{field}_over"), getattr(self, f"{field}_under")
            if not 0.0 < under < over <= 1.0:
                raise ConfigError(f"{field}_under", under, f"give more than 0 and less than {over}")
        if self.samples < 1:
            raise ConfigError("samples", self.samples, "give 1 or more")


@dataclass(slots=True)
class _Row:
    hot: bool = False
    in_a_row: int = 0
    """Samples in a row that speak for the other state."""


class DrainRule:
    """Remembers the last samples of each engine."""

    def __init__(self, engines: int, thresholds: DrainThresholds | None = None) -> None:
        self._thresholds = thresholds or DrainThresholds()
        self._rows = [_Row() for _ in range(engines)]

    def sample(self, engine: int, util: float, mem: float) -> bool:
        """Whether the engine is hot after this sample: the value of `fleet.hot[engine]`.

        A NaN (nothing could be read) leaves everything as it was.
        """
        row = self._rows[engine]
        if util != util or mem != mem:
            return row.hot
        row.in_a_row = row.in_a_row + 1 if self._speaks_against(row.hot, util, mem) else 0
        if row.in_a_row >= self._thresholds.samples:
            row.hot, row.in_a_row = not row.hot, 0
        return row.hot

    def sample_all(self, util: Sequence[float], mem: Sequence[float]) -> list[bool]:
        """One sample of each engine, in order; grows and shrinks with the fleet."""
        while len(self._rows) < len(util):
            self._rows.append(_Row())
        del self._rows[len(util) :]
        return [self.sample(i, float(util[i]), float(mem[i])) for i in range(len(util))]

    def forget(self, engine: int) -> None:
        """The engine is new: it is not hot and has no samples."""
        self._rows[engine] = _Row()

    def _speaks_against(self, hot: bool, util: float, mem: float) -> bool:
        marks = self._thresholds
        if hot:
            return util < marks.util_under or mem < marks.mem_under
        return util > marks.util_over and mem > marks.mem_over
