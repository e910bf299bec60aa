"""llm-d and the inference gateway: three scores between 0 and 1, weighted and added.

Formula: 2 * (longest - queue) / (longest - shortest) + 2 * (1 - kv_used) + 3 * held / prompt; the
queue term is 1 for all when queues are equal. Highest sum, ties at random. Origin:
llm-d/llm-d-inference-scheduler, pkg/epp/config/loader/defaults.go (plugins and weights), and
kubernetes-sigs/gateway-api-inference-extension, pkg/epp/scheduling/framework/plugins
(scorer/queue.go, scorer/kvcache_utilization.go, multi/prefix/plugin.go,
picker/max_score_picker.go).

Approximated in its favour: there, queue and KV use are scraped every 50 ms; here they are current.
The queue there is vLLM's `num_requests_waiting`, here streams without a first token. Prefix hits
there are guessed from hashes of earlier requests; here they are known.
"""

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.core.ports import Rng
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines
from zerolayer.dispatch.policies.expected_wait import tokens_to_compute

QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0
PREFIX_WEIGHT = 3.0


class LlmdScorers:
    """See the module's docstring."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is the negative sum, so that smaller is better."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        able = np.flatnonzero(eligible)
        scores = summed_scores(fleet, request, eligible)
        tied = np.flatnonzero(scores == scores.max())
        at = int(tied[self._rng.randrange(tied.size)])
        score = float(scores[at])
        scores[at] = -np.inf
        runner_up = int(able[scores.argmax()]) if able.size > 1 else None
        return Decision(int(able[at]), -score, runner_up, "llmd_scorers" + suffix)


def summed_scores(fleet: FleetState, request: PlacementRequest, among: Bools) -> Floats:
    """The weighted sum for each engine of `among`, in their order; 0 to 7."""
    queue = fleet.waiting_requests[among]
    longest, shortest = queue.max(), queue.min()
    free_queue = (longest - queue) / (longest - shortest) if longest > shortest else 1.0
    prompt = float(max(1, request.prompt_tokens))
    held = 1.0 - tokens_to_compute(fleet, request)[among] / prompt
    free_kv = 1.0 - fleet.kv_used_fraction[among]
    total: Floats = QUEUE_WEIGHT * free_queue + KV_WEIGHT * free_kv + PREFIX_WEIGHT * held
    return total
