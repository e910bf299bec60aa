"""Of two engines drawn at random, the one with fewer streams.

Formula: draw i != j; argmin(streams_i, streams_j), i on a tie. Origin: Mitzenmacher, *The Power of
Two Choices in Randomized Load Balancing* (IEEE TPDS 12(10), 2001); `power_of_two` in SMG
(lightseekorg/smg, model_gateway/src/policies/power_of_two.rs) and in vllm-router, which compare KV
tokens where a metrics service reports them for both and requests in flight otherwise. The latter is
what is done here, with exact counts.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState
from zerolayer.core.ports import Rng
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines


class PowerOfTwo:
    """See the module's docstring."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is the chosen engine's number of streams."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        able = np.flatnonzero(eligible)
        reason = "power_of_two" + suffix
        if able.size == 1:
            only = int(able[0])
            return Decision(only, float(fleet.running_requests[only]), None, reason)
        first = self._rng.randrange(able.size)
        # An offset of 1..size-1 makes the second one different in one draw.
        second = (first + 1 + self._rng.randrange(able.size - 1)) % able.size
        one, other = int(able[first]), int(able[second])
        load_one, load_other = fleet.running_requests[one], fleet.running_requests[other]
        if load_other < load_one:
            one, other, load_one = other, one, load_other
        return Decision(one, float(load_one), other, reason)
