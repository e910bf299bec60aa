"""The entropy objective alone: the source's scheduler, and its new value.

Formula: argmin_i abs(E(fleet after the request goes to i) - E(fleet now)), with E of
`dispatch.entropy`, weights (0.6, 0.3, 0.1), utilisation from what is placed now and no forecast;
engines over 95 % are left out while another one is under it, the one that ends lowest otherwise.
Origin: the source (mission, P2). Its choice is kept for comparison as `entropy_source`; `entropy`
takes argmin_i E(fleet after) instead, and `dispatch.entropy` says why.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.entropy import (
    SOURCE_WEIGHTS,
    EntropyWeights,
    Limits,
    Variant,
    of_placement,
    within_limits,
)
from zerolayer.dispatch.load import Appraisal
from zerolayer.dispatch.policies.base import (
    Decision,
    PlacementRequest,
    Rotation,
    eligible_engines,
)


class EntropyOnly:
    """The objective alone, in either variant."""

    def __init__(
        self,
        variant: Variant = Variant.SOURCE,
        weights: EntropyWeights = SOURCE_WEIGHTS,
        limits: Limits | None = None,
    ) -> None:
        self._variant = variant
        self._limits = limits or Limits()
        self._weights = weights
        self._case = Appraisal()
        self._rotation = Rotation("entropy_source" if variant is Variant.SOURCE else "entropy")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is in utilisation."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        case = self._case
        case.take(fleet, request)
        case.state_now(fleet)
        among = within_limits(eligible, case.after, self._limits)
        if among is None:
            after = case.after[0]
            return self._rotation.pick_among(fleet, eligible, after, 0.0, suffix + ":overload")
        scores = of_placement(fleet, case.state, case.added, request.domain, self._weights)
        if self._variant is Variant.SOURCE:
            scores = np.abs(scores)
        return self._rotation.pick_among(fleet, among, scores, 0.0, suffix)
