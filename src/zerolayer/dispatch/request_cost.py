"""What one request will cost on each engine: seconds until its first token, and its load over time.

Utilisation of an engine in a window is the share of its compute capacity that is in demand:
`util = p + n / n_max`, with `p` seconds of prefill work in demand per second (what is left of the
backlog when the window begins, and what arrives in it), `n` streams decoding on average, and
`n_max` streams that it can decode at once. Above 1, work is left over for the next window.

The model is fluid: an engine works its prefill backlog off at one second per second in the order of
arrival, a stream decodes from then on with one token per step, and survives as `OutputLengths` say.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, FleetState, Floats
from zerolayer.dispatch.output_lengths import OutputLengths
from zerolayer.dispatch.policies.base import PlacementRequest
from zerolayer.dispatch.policies.expected_wait import expected_wait_s, tokens_to_compute

STEP_S_MIN = 1e-3
"""Shortest step that a decode rate is derived from, in seconds."""
DECODE_SHARE_MIN = 0.1
"""However much prefill there is, each of its steps brings every stream a token."""
ERRORS_KEPT = 512
"""Predictions that `PredictionErrors` keeps. The oldest is forgotten first."""

_ENDS = np.arange(1.0, HORIZON_S + 1.0)  # end of each window, in seconds from now


@dataclass(frozen=True, slots=True)
class RequestCost:
    """A request on each engine. Load is per window of one second, HORIZON_S of them."""

    ttft_s: Floats
    """Expected seconds to its first token, shape (engines,)."""
    util: Floats
    """What it adds to the engine's utilisation, shape (engines, HORIZON_S)."""
    mem: Floats
    """What it adds to the share of KV in use, shape (engines, HORIZON_S)."""


def request_cost(
    fleet: FleetState, request: PlacementRequest, lengths: OutputLengths
) -> RequestCost:
    """Cost of `request` on every engine, were it placed there now."""
    own_s = tokens_to_compute(fleet, request) * fleet.prefill_s_per_token
    backlog_s = fleet.waiting_tokens * fleet.prefill_s_per_token
    without = prefill_demand(backlog_s, np.zeros((fleet.engines, HORIZON_S)))
    with_it = prefill_demand(backlog_s + own_s, np.zeros((fleet.engines, HORIZON_S)))
    rate = decode_tokens_per_s(decode_step_s(fleet), busy_share(without))
    starts = (backlog_s + own_s)[:, None]
    active = np.clip(_ENDS - starts, 0.0, 1.0)
    age_s = np.maximum(0.0, _ENDS - 0.5 * active - starts)
    alive = active * lengths.survival_at(age_s * rate[:, None])
    context = request.prompt_tokens + age_s * rate[:, None]
    return RequestCost(
        ttft_s=expected_wait_s(fleet, request),
        util=with_it - without + alive / decode_places(fleet)[:, None],
        mem=alive * context / fleet.kv_tokens[:, None],
    )


def decode_step_s(fleet: FleetState) -> Floats:
    """Seconds of a step without the prefill that is in it now, shape (engines,)."""
    prefill_s = fleet.in_flight_prefill_tokens * fleet.prefill_s_per_token
    step_s: Floats = np.maximum(STEP_S_MIN, fleet.expected_step_s - prefill_s)
    return step_s


def decode_tokens_per_s(step_s: Floats, prefill_share: Floats) -> Floats:
    """Tokens per second of one decoding stream over the next seconds, shape (engines,).

    A step takes its decode time and the time of the prefill in it (`cost.StepCostModel`), so where
    prefill takes the share p of an engine's time, streams get (1 - p) / decode time steps a second.
    `step_s`: decode time; `prefill_share`: p; both of shape (engines,).
    """
    rate: Floats = np.maximum(DECODE_SHARE_MIN, 1.0 - prefill_share) / step_s
    return rate


def busy_share(demand: Floats) -> Floats:
    """Share of the next HORIZON_S seconds that prefill takes, from `prefill_demand`."""
    share: Floats = np.minimum(demand, 1.0).mean(axis=1)
    return share


def decode_places(fleet: FleetState) -> Floats:
    """`n_max`: streams that each engine can decode at once; at least 1. Shape (engines,).

    min(places in a batch, KV tokens / mean context). The mean is the whole fleet's: one long stream
    says little of those that will run beside it.
    """
    streams = float(fleet.running_requests.sum())
    if streams <= 0.0:
        return fleet.requests_max.copy()
    tokens = float(fleet.running_tokens.sum() + fleet.waiting_context.sum())
    places = np.minimum(fleet.requests_max, fleet.kv_tokens / max(1.0, tokens / streams))
    at_least_one: Floats = np.maximum(1.0, places)
    return at_least_one


def prefill_demand(backlog_s: Floats, arriving_s: Floats) -> Floats:
    """Seconds of prefill in demand in each window: left of the backlog, and arriving.

    `backlog_s` shape (engines,), `arriving_s` shape (engines, HORIZON_S), as is the result.
    """
    demand = np.empty_like(arriving_s)
    left = backlog_s
    for window in range(arriving_s.shape[1]):
        demand[:, window] = left + arriving_s[:, window]
        left = np.maximum(0.0, demand[:, window] - 1.0)
    return demand


@dataclass(frozen=True, slots=True)
class PredictionError:
    """|actual - predicted| / actual of the last predictions."""

    count: int
    p50: float
    p90: float


class PredictionErrors:
    """Absolute percentage errors of the last ERRORS_KEPT predictions, as shares of the actual."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def observe(self, predicted: float, actual: float) -> None:
        """A prediction met its outcome; an outcome of 0 or less is ignored."""
        if actual > 0.0:
            self._errors.append(abs(actual - predicted) / actual)

    def percentiles(self) -> PredictionError:
        """How far predictions were off lately; zeros before the first."""
        if not self._errors:
            return PredictionError(0, 0.0, 0.0)
        p50, p90 = np.quantile(np.array(self._errors), (0.5, 0.9))
        return PredictionError(len(self._errors), float(p50), float(p90))
