"""The source's scheduler: the placement that changes the objective least, on today's load.

Formula: argmin_i abs(E(fleet after the request goes to i) - E(fleet now)), with E of
`dispatch.entropy`, weights (0.6, 0.3, 0.1), utilisation from what is placed now and no forecast;
engines over 95 % are left out while another one is under it, the one that ends lowest otherwise.
Origin: the source (mission, P2). Its choice is kept for comparison; `dispatch.entropy` says why
ours minimises the new value.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState, Floats
from zerolayer.dispatch.entropy import (
    SOURCE_WEIGHTS,
    Entropy,
    EntropyWeights,
    Limits,
    Variant,
    feasible_engines,
    waste,
)
from zerolayer.dispatch.load import added_by, utilisation_now
from zerolayer.dispatch.policies.base import (
    Decision,
    PlacementRequest,
    Rotation,
    eligible_engines,
    holds_any,
)
from zerolayer.dispatch.policies.expected_wait import tokens_to_compute
from zerolayer.dispatch.request_cost import decode_places


class EntropyOnly:
    """The objective alone, in either variant."""

    def __init__(
        self,
        variant: Variant = Variant.SOURCE,
        weights: EntropyWeights = SOURCE_WEIGHTS,
        limits: Limits | None = None,
    ) -> None:
        self._variant = variant
        self._total = weights.total
        self._limits = limits or Limits()
        self._entropy = Entropy(weights)
        self._rotation = Rotation("entropy_source" if variant is Variant.SOURCE else "entropy")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is in utilisation."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        state, added = _today(fleet, request)
        feasible = eligible & feasible_engines(state, added, self._limits)
        if not holds_any(feasible):
            after = state[0] + added[0]
            return self._rotation.pick_among(fleet, eligible, after, 0.0, suffix + ":overload")
        scores = self._entropy.of_placement(fleet, state, added, request.domain)
        if self._variant is Variant.SOURCE:
            scores = np.abs(scores)
        scores = scores + self._total * waste(added[0], feasible)
        return self._rotation.pick_among(fleet, feasible, scores, 0.0, suffix)


def _today(fleet: FleetState, request: PlacementRequest) -> tuple[Floats, Floats]:
    """(utilisation and memory now, what the request adds), each of shape `(2, engines)`."""
    places = decode_places(fleet)
    own = tokens_to_compute(fleet, request)
    backlog_s = fleet.waiting_tokens * fleet.prefill_s_per_token
    added = added_by(fleet, request, own, backlog_s, places)
    state = np.stack((utilisation_now(fleet, places), fleet.kv_used_fraction))
    return state, np.stack((added.util, added.mem))
