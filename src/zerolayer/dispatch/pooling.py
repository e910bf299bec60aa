"""What steps cost on engines of one kind: each one's own steps, weighed against all others'.

An engine's steps tell its model little of some things: few have prefill in them, context grows with
the number of streams, and other programs take the cores now and then. Two equal engines then differ
by half in what a prompt token is said to cost, and whichever is thought the faster gets every long
prompt. So the coefficients of engine i are taken as m + e_i, with e_i from N(0, T), where its own
steps say b_i with covariance P_i (`StepCostModel.belief`). The best linear estimate (Robinson,
"That BLUP is a good thing", 1991; empirical Bayes, Morris, 1983) is

    W_i = (P_i + T)^-1        m = (sum W_i)^-1 sum W_i b_i        m + T W_i (b_i - m)

Where an engine's own steps say a thing clearly, P_i is small and b_i stays; where they do not, the
others' count. An engine that has done nothing yet is expected to be like the rest, so it gets work
also where the prior is far too slow. An engine that is really other than the rest (throttled, on a
busy box) must stay so: e_i has the long tails of Student's t, by way of T / u_i for T with

    u_i = (NU + 5) / (NU + d_i^2)       d_i^2 = (b_i - m)' W_i (b_i - m)

(Lange, Little, Taylor, "Robust statistical modeling using the t distribution", 1989).
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from zerolayer.core.fleet_state import Floats, Ints
from zerolayer.dispatch.cost import StepCostModel, StepTimes, StepWork

SPEED_SPREAD = 0.1
"""In T: standard deviation of the speed of engines of one kind, as a share. GPUs of one model
differ by 3 to 8 % (`sim/faults.py`), throttled ones by more."""
TERM_SPREAD = 0.05
"""In T: standard deviation of each coefficient beside speed."""
NU = 4.0
"""Degrees of freedom: usual for robust fits."""
ROUNDS = 3
"""Of finding m and u in turns."""
REFRESH_EVERY_S = 0.5
"""Pooling takes 3 ms for 256 engines, on a busy core."""
STEPS_AT_ONCE = 20
"""First steps of an engine that change what is believed of it at once."""
FLOOR_SHARE = 0.002
"""The same as a share of the prior's deviation, for a coefficient that is near zero."""


class CostPool:
    """m and T of engines of one kind."""

    def __init__(self, models: Sequence[StepCostModel]) -> None:
        """From what they have learned so far; one or more."""
        b, p = _beliefs(models)
        floor = np.diag(np.square(FLOOR_SHARE * models[0].belief.prior_deviations))
        usual = _weighted_mean(np.linalg.inv(p + floor), b)
        speed = SPEED_SPREAD * usual
        self._spread = np.outer(speed, speed) + np.diag(np.square(TERM_SPREAD * usual)) + floor
        spreads = np.broadcast_to(self._spread, p.shape)
        for _ in range(ROUNDS):
            self._mean = _weighted_mean(np.linalg.inv(p + spreads), b)
            spreads = self._spreads(p, b - self._mean)

    def times(self, models: Sequence[StepCostModel]) -> list[StepTimes]:
        """Of some of the engines, or of more like them."""
        b, p = _beliefs(models)
        off = b - self._mean
        spreads = self._spreads(p, off)
        own = (spreads @ np.linalg.solve(p + spreads, off[:, :, None]))[:, :, 0]
        return [StepTimes.of(row) for row in np.maximum(0.0, self._mean + own)]

    def _spreads(self, p: Floats, off: Floats) -> Floats:
        """T / u of engines that are `off` the mean, shape (engines, 5): (engines, 5, 5)."""
        weighted = np.linalg.solve(p + self._spread, off[:, :, None])[:, :, 0]
        far = (off * weighted).sum(axis=1)
        commonness = np.minimum(1.0, (NU + 5.0) / (NU + far))
        spreads: Floats = self._spread / commonness[:, None, None]
        return spreads


class FleetCosts:
    """A model for each engine, and the step times that follow from all of them."""

    def __init__(self) -> None:
        self.models: list[StepCostModel] = []
        self.times: list[StepTimes] = []
        """Of each engine, pooled."""
        self._pools: list[CostPool | None] = []

    def resize(self, models: Sequence[StepCostModel]) -> None:
        """These from now on, new ones as they stand."""
        self.models = list(models)
        kept = len(self.times)
        self.times = [*self.times, *(model.times for model in self.models[kept:])][: len(models)]
        self._pools = [*self._pools, *([None] * len(models))][: len(models)]

    def observe(self, engine: int, work: StepWork, seconds: float) -> None:
        """A step of this engine has ended. Its first steps tell so much that they count at once,
        later ones from the next `refresh` on."""
        model, pool = self.models[engine], self._pools[engine]
        model.observe(work, seconds)
        if model.steps > STEPS_AT_ONCE:
            return
        if pool is None:
            self.times[engine] = model.times
        else:
            self._pool([engine], pool)

    def refresh(self, domain: Ints) -> None:
        """Pool anew, every `REFRESH_EVERY_S` or so. `domain`: engines of one kind share a number;
        shape (engines,)."""
        kinds = domain[: len(self.models)]
        for kind in np.unique(kinds).tolist():
            members = np.flatnonzero(kinds == kind).tolist()
            self._pool(members, None)

    def _pool(self, members: Sequence[int], pool: CostPool | None) -> None:
        """Times of these from that pool or from one of their own; where it cannot be computed,
        what was known stays."""
        models = [self.models[engine] for engine in members]
        with suppress(np.linalg.LinAlgError):
            pool = pool or CostPool(models)
            for engine, times in zip(members, pool.times(models), strict=True):
                self._pools[engine], self.times[engine] = pool, times


def _beliefs(models: Sequence[StepCostModel]) -> tuple[Floats, Floats]:
    """b and P of each: shapes (engines, 5) and (engines, 5, 5)."""
    beliefs = [model.belief for model in models]
    return np.array([b.mean for b in beliefs]), np.array([b.covariance for b in beliefs])


def _weighted_mean(weights: Floats, b: Floats) -> Floats:
    mean: Floats = np.linalg.solve(weights.sum(axis=0), (weights @ b[:, :, None]).sum(axis=0))
    return mean[:, 0]
