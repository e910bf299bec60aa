"""Any engine with the same chance: what a load balancer without memory does.

Formula: P(i) = 1 / eligible engines. Origin: the baseline of every paper on the subject; `random`
in SMG (lightseekorg/smg, model_gateway/src/policies/random.rs) and in Dynamo's `--router-mode`.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState
from zerolayer.core.ports import Rng
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines


class UniformRandom:
    """See the module's docstring."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        able = np.flatnonzero(eligible)
        return Decision(int(able[self._rng.randrange(able.size)]), 0.0, None, "random" + suffix)
