"""Utilisation of each engine as one number, and what one more stream adds to it.

A window's utilisation is what `request_cost` says: `util = p + n / n_max`, prefill demanded per
second + streams that decode / streams that the engine can decode at once. Here it is the mean over
the next HORIZON_S seconds, so that a decision compares two numbers per engine. Where hardware
counters exist (`fleet.util_measured`), the larger of both counts.
"""

from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, FleetState, Floats
from zerolayer.dispatch.policies.base import PlacementRequest, holds_any

WINDOW_S = float(HORIZON_S)
"""Seconds over which a utilisation is meant."""
_MEAN = np.full(HORIZON_S, 1.0 / HORIZON_S)


@dataclass(frozen=True, slots=True)
class Added:
    """What a stream would add to each engine if it went there; arrays of shape `(engines,)`."""

    util: Floats
    mem: Floats
    """Share of the engine's KV, when the stream has its whole expected length; 0 where the capacity
    is not known."""


def utilisation_now(fleet: FleetState, places: Floats) -> Floats:
    """Utilisation of the next seconds from what is placed on each engine now, shape `(engines,)`.

    `places`: `request_cost.decode_places`. Streams that wait count as decoding: they will within
    the window, or there is a queue.
    """
    util: Floats = fleet.waiting_tokens * fleet.prefill_s_per_token
    util /= WINDOW_S
    util += fleet.running_requests / places
    np.maximum(util, fleet.util_measured, out=util)
    return util


def utilisation_expected(fleet: FleetState, places: Floats) -> Floats:
    """Utilisation as the forecast has it, mean of its columns; `utilisation_now` where nobody
    keeps a forecast (all its columns are zero)."""
    util: Floats = np.dot(fleet.forecast_util, _MEAN)
    if not util[util.argmax()] > 0.0:
        return utilisation_now(fleet, places)
    np.maximum(util, fleet.util_measured, out=util)
    return util


def memory_expected(fleet: FleetState) -> Floats:
    """Share of KV in use over the next seconds: the larger of forecast and measurement."""
    mem: Floats = np.dot(fleet.forecast_mem, _MEAN)
    np.maximum(mem, fleet.kv_used_fraction, out=mem)
    return mem


def added_by(
    fleet: FleetState, request: PlacementRequest, own: Floats, backlog_s: Floats, places: Floats
) -> Added:
    """What `request` adds to each engine.

    `own`: prompt tokens to compute there; `backlog_s`: seconds of prefill that wait there;
    `places`: `request_cost.decode_places`. Work behind a backlog is in demand in every window until
    it is done, so the prefill counts once and once more per second of backlog, as in
    `request_cost.prefill_demand`. The stream decodes for expected_output_tokens steps, which may
    end within the window; that it begins later is left out.
    """
    util = np.minimum(backlog_s, WINDOW_S - 1.0)
    util += 1.0
    util *= own
    util *= fleet.prefill_s_per_token
    decoding = fleet.expected_step_s * max(1, request.expected_output_tokens)
    np.minimum(decoding, WINDOW_S, out=decoding)
    decoding /= places
    util += decoding
    util /= WINDOW_S
    mem: Floats = own + request.expected_output_tokens
    mem /= fleet.kv_tokens
    return Added(util, mem)


def fleet_is_one_domain(fleet: FleetState) -> bool:
    """Whether all engines count as equal."""
    return not holds_any(fleet.domain != fleet.domain[0])
