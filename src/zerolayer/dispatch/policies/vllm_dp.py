"""vLLM's own data-parallel balancer: streams, and more for a queue on a full cache.

Formula: max(in flight, waiting + running) + [waiting > 0] * waiting * 6 * max(0, kv_used - 0.5);
the first one in scan order on a tie, and the scan starts one engine later with each request.
Origin: vLLM 0.32, vllm/v1/engine/core_client.py, DPLBAsyncMPClient.get_core_engine_for_request.

Approximated in its favour: there, waiting, running and KV use come from a coordinator every 100 ms,
while the count in flight is exact; here all are as fresh as ours. With one front end, as here, the
count in flight bounds the error from below, so the difference is small. `waiting` there are
requests in the engine's queue; here streams without a first token, which also has those whose
prefill runs.
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines

KV_PENALTY = 6.0
KV_PENALTY_FROM = 0.5


class VllmDataParallel:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._start = 0

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        pressure = np.maximum(fleet.kv_used_fraction - KV_PENALTY_FROM, 0.0)
        scores = fleet.running_requests + fleet.waiting_requests * KV_PENALTY * pressure
        scores = np.where(eligible, scores, np.inf)
        start = self._start % fleet.engines
        self._start = start + 1
        engine = (int(np.roll(scores, -start).argmin()) + start) % fleet.engines
        score = float(scores[engine])
        scores[engine] = np.inf
        second = int(scores.argmin())
        runner_up = second if scores[second] < np.inf else None
        return Decision(engine, score, runner_up, "vllm_dp" + suffix)
