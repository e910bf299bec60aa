"""The engine from which the first token is expected soonest, in seconds."""

import numpy as np

from zerolayer.core.fleet_state import FleetState, Floats
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, Rotation, holds_any

TIE_SHARE = 0.1
"""Waits within this share of the shortest are the same: step times are not known better than
that."""
STEPS_TO_FIRST_TOKEN = 1.5
"""Half of the step that runs, on average, and one of its own."""
KV_KNEE = 0.9
"""KV use from which a new stream is likely to push another one out (vLLM preempts when blocks run
out)."""


class ExpectedWait:
    """The engine from which the first token is expected soonest."""

    def __init__(self) -> None:
        self._rotation = Rotation("expected_wait")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        waits = expected_wait_s(fleet, request)
        return self._rotation.pick(fleet, request, exclude, waits, tie=TIE_SHARE)


def expected_wait_s(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Expected seconds until the first token of `request`, per engine (shape `(engines,)`).

    step now running (half of it on average) + one step of its own, both slowed by this stream
    + prefill of what waits and of its own prompt
    + a free place in the batch: with s places and r >= s streams, (r - s + 1) of them must end
      first
    + KV pressure: past the knee, streams are pushed out and computed again.
    """
    own = tokens_to_compute(fleet, request)
    waits: Floats = fleet.running_requests * fleet.decode_s_per_request
    waits += fleet.expected_step_s
    waits *= STEPS_TO_FIRST_TOKEN
    backlog = fleet.waiting_tokens + own
    backlog *= fleet.prefill_s_per_token
    waits += backlog
    crowding = crowding_s(fleet, request, own)
    return waits if crowding is None else waits + crowding


def crowding_s(fleet: FleetState, request: PlacementRequest, own: Floats) -> Floats | None:
    """The last two terms of `expected_wait_s`: a place in the batch, and KV pressure. None where
    both are zero everywhere. `own`: what `tokens_to_compute` says."""
    crowding: Floats | None = None
    if holds_any(fleet.running_requests >= fleet.requests_max):
        crowding = _place_in_batch_s(fleet, request)
    pressure = fleet.kv_used_fraction + own / fleet.kv_tokens
    if holds_any(pressure > KV_KNEE):
        over = np.clip((pressure - KV_KNEE) / (1.0 - KV_KNEE), 0.0, None)
        over *= (fleet.running_tokens + own) * fleet.prefill_s_per_token
        crowding = over if crowding is None else crowding + over
    return crowding


def tokens_to_compute(
    fleet: FleetState, request: PlacementRequest, out: Floats | None = None
) -> Floats:
    """Prompt tokens that each engine lacks; at least one, as the last one is always computed.

    Written into `out` where that is given.
    """
    prompt = float(max(1, request.prompt_tokens))
    own = np.empty(fleet.engines) if out is None else out
    own.fill(prompt)
    for engine, held in (request.held_tokens or {}).items():
        if 0 <= engine < fleet.engines:
            own[engine] = max(1.0, prompt - max(0, held))
    return own


def _place_in_batch_s(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Streams end at the rate of places per answer time; the estimate for others is our own
    request's."""
    surplus: Floats = np.clip(fleet.running_requests - fleet.requests_max + 1.0, 0.0, None)
    answer_s = max(1, request.expected_output_tokens) * fleet.expected_step_s
    surplus *= answer_s
    surplus /= fleet.requests_max
    return surplus
