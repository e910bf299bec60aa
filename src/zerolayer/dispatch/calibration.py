"""How far the fleet's load forecast is off on average, per horizon, and the factor that mends it.

The fluid model of `request_cost` lets a backlog drain by the mean inflow. Real arrivals come in
clumps, so a queue forms where the model sees none; how much depends on the traffic and on how well
the policy balances, which no formula here knows. It is measured: once a second the mean load of
the fleet is put beside what was said of it 1 to HORIZON_S seconds ago, before any correction.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Floats

MEMORY_S = 60.0
"""Seconds after which a comparison weighs 1/e of a new one."""
LATE_MAX_S = 0.6
"""A look that comes later than this after its second makes what was said meanwhile useless."""
FACTOR_MAX = 2.0
"""No forecast is multiplied or divided by more: beyond, the model is wrong in another way."""
FAINT = 0.02
"""Loads of this size and below say nothing about the model."""

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The whole fleet now; means over its engines."""

    backlog_s: float
    """Seconds of prefill that wait."""
    came_s: float
    """Seconds of prefill that were placed since the start of the process."""
    decoding: float
    """Streams that decode / streams that can decode."""
    mem: float
    """Share of KV in use."""


class Calibration:
    """Factors for utilisation and memory at each horizon."""

    def __init__(self) -> None:
        self._last: FleetLoad | None = None
        self._last_ns = 0
        self._said: deque[Floats] = deque(maxlen=HORIZON_S)  # newest first
        self._sums = np.full((2, 2, HORIZON_S), FAINT)  # (came, said), (util, mem), horizon

    def factors(self, now_ns: int, load: FleetLoad, said: Floats) -> Floats:
        """What to multiply a forecast with, shape (2, HORIZON_S): utilisation and memory.

        `said`: the fleet's mean forecast, uncorrected, of the same shape. Call it at every refresh.
        """
        if self._last is None or now_ns - self._last_ns >= _SECOND_NS:
            self._compare(now_ns, load)
            self._said.appendleft(said)
            self._last, self._last_ns = load, now_ns
        came, said_before = self._sums
        factors: Floats = np.clip(came / said_before, 1.0 / FACTOR_MAX, FACTOR_MAX)
        return factors

    def _compare(self, now_ns: int, load: FleetLoad) -> None:
        seconds = (now_ns - self._last_ns) / 1e9
        if self._last is None or seconds > 1.0 + LATE_MAX_S:
            self._said.clear()
            return
        # Demand of a window is what waits at its begin and what comes in it (`prefill_demand`).
        demand = self._last.backlog_s + (load.came_s - self._last.came_s) / seconds
        decoding = 0.5 * (self._last.decoding + load.decoding)
        came = np.array((demand + decoding, 0.5 * (self._last.mem + load.mem)))
        keep = float(np.exp(-seconds / MEMORY_S))
        for ahead, said in enumerate(self._said):
            sums = self._sums[:, :, ahead]
            sums *= keep
            sums += (1.0 - keep) * np.maximum(FAINT, np.array((came, said[:, ahead])))
