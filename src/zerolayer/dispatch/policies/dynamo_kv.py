"""Dynamo's KV router: blocks to prefill after prefix hits, and blocks held by decoding.

Formula: 1.0 * max(0, waiting blocks + prompt blocks - 1.0 * held blocks) + (active blocks + the
request's own); least cost, ties at random. With a temperature above 0, a draw with
P ~ exp(-cost / ((max - min) * temperature)). Origin: ai-dynamo/dynamo,
lib/kv-router/src/scheduling/selector/default.rs (`worker_logit`, `softmax_sample_index`), weights
as in its KvRouterConfig (overlap credit 1, prefill scale 1, no charge per request, temperature 0).

Approximated: blocks that streams share are counted once per stream, as we do not know them; held
tokens are taken as device hits (its credits for host and disk are 0.75 and 0.25).
"""

import numpy as np

from zerolayer.core.fleet_state import FleetState, Floats
from zerolayer.core.ports import Rng
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, eligible_engines
from zerolayer.dispatch.policies.expected_wait import tokens_to_compute

BLOCK_TOKENS = 16
"""vLLM's default KV block."""
OVERLAP_CREDIT = 1.0
PREFILL_SCALE = 1.0


class DynamoKv:
    """See the module's docstring."""

    def __init__(self, rng: Rng, temperature: float = 0.0) -> None:
        """`temperature`: 0 for the best engine, more for a softmax draw over the costs."""
        self._rng = rng
        self._temperature = temperature

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. The score is in KV blocks."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        able = np.flatnonzero(eligible)
        costs = cost_blocks(fleet, request)[able]
        at = self._draw(costs) if self._temperature > 0.0 else self._least(costs)
        score = float(costs[at])
        costs[at] = np.inf
        runner_up = int(able[costs.argmin()]) if able.size > 1 else None
        return Decision(int(able[at]), score, runner_up, "dynamo_kv" + suffix)

    def _least(self, costs: Floats) -> int:
        tied = np.flatnonzero(costs == costs.min())
        return int(tied[self._rng.randrange(tied.size)])

    def _draw(self, costs: Floats) -> int:
        span = float(costs.max() - costs.min())
        if span == 0.0:
            return self._rng.randrange(costs.size)
        shares = np.exp((costs.min() - costs) / (span * self._temperature))
        ends = np.cumsum(shares / shares.sum())
        return min(int(np.searchsorted(ends, self._rng.random())), costs.size - 1)


def cost_blocks(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Dynamo's cost of each engine, in blocks."""
    prompt = float(max(1, request.prompt_tokens))
    overlap = OVERLAP_CREDIT * (prompt - tokens_to_compute(fleet, request))
    prefill = np.maximum(0.0, fleet.waiting_tokens + prompt - overlap)
    decode = fleet.running_tokens + fleet.waiting_tokens + prompt
    cost: Floats = (PREFILL_SCALE * prefill + decode) / BLOCK_TOKENS
    return cost
