"""SMG's least load: seconds to work off what is queued, and a barrier before a full cache.

Formula: (queued + in-flight prompt tokens) / tokens generated per second
+ 0.15 s * k / (1 - k), with k the share of KV in use; 2,000 tokens/s where no rate is known.
Origin: lightseekorg/smg, model_gateway/src/policies/least_load.rs.

Approximated in its favour: there, loads are polled every 10 s and tokens sent since are added; here
the queued tokens are exact at every moment, so nothing has to be added. On a tie it takes the first
worker; here the one with the fewest streams, then by turns.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, Rotation

KV_WEIGHT_S = 0.15
TOKENS_PER_S_DEFAULT = 2_000.0
KV_USED_MAX = 0.999


class SmgLeastLoad:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._rotation = Rotation("smg_least_load")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is in seconds."""
        rate = np.where(fleet.tokens_per_s > 0.0, fleet.tokens_per_s, TOKENS_PER_S_DEFAULT)
        used = np.minimum(fleet.kv_used_fraction, KV_USED_MAX)
        scores = fleet.waiting_tokens / rate + KV_WEIGHT_S * used / (1.0 - used)
        return self._rotation.pick(fleet, request, exclude, scores)
