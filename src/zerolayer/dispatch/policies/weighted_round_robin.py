"""Turns in proportion to static weights: the router that the source replaced.

Formula: each eligible engine's credit grows by its weight; the one with the most credit is chosen
and pays the sum of the weights. Origin: the source's legacy router; the smooth order is nginx's
(src/http/ngx_http_upstream_round_robin.c), so that equal weights are a plain round robin.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState, Floats
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines


class WeightedRoundRobin:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._credit: Floats = np.zeros(0)

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. Engines of weight 0 get streams only when no other is eligible."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        if self._credit.size != fleet.engines:
            self._credit = np.zeros(fleet.engines)
        weights = np.where(eligible, fleet.weight, 0.0)
        if not weights.any():
            weights = eligible.astype(np.float64)
        self._credit += weights
        credit = np.where(weights > 0.0, self._credit, -np.inf)
        engine = int(credit.argmax())
        self._credit[engine] -= weights.sum()
        return Decision(engine, 0.0, None, "weighted_round_robin" + suffix)
