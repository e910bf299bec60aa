"""Utilisation of each engine as one number, and what one more stream costs and adds there.

A window's utilisation is what `request_cost` says: `util = p + n / n_max`, prefill demanded per
second + streams that decode / streams that the engine can decode at once. Here it is the mean over
the next HORIZON_S seconds, so that a decision compares two numbers per engine. Where other programs
are known to run on an engine's GPU, they are in it (`neighbours`).
"""

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, FleetState, Floats
from zerolayer.dispatch.neighbours import added_beside_neighbours, beside_neighbours
from zerolayer.dispatch.policies.base import PlacementRequest
from zerolayer.dispatch.policies.expected_wait import tokens_to_compute
from zerolayer.dispatch.request_cost import STEP_S_MIN

WINDOW_S = float(HORIZON_S)
"""Seconds over which a utilisation is meant."""
_MEAN = np.full(HORIZON_S, 1.0 / HORIZON_S)


class Appraisal:
    """One request on every engine. It owns its arrays and writes them anew with each `take`, as a
    decision has no time to allocate: copy what is to be kept."""

    def __init__(self) -> None:
        self._resize(0)

    def take(self, fleet: FleetState, request: PlacementRequest) -> None:
        """Appraise `request`; one more call, of the three that begin with `state`, says beside
        what."""
        if fleet.engines != self.engines:
            self._resize(fleet.engines)
        self.output = float(max(1, request.expected_output_tokens))
        tokens_to_compute(fleet, request, self.own)
        np.multiply(fleet.waiting_tokens, fleet.prefill_s_per_token, out=self.backlog_s)
        np.multiply(self.own, fleet.prefill_s_per_token, out=self.own_s)
        self._fill_decode_step(fleet)
        self._fill_added(fleet, request)

    def state_now(self, fleet: FleetState) -> None:
        """Utilisation and memory from what is placed on each engine now, as if it stayed.

        Streams that wait count as decoding: they will within the window, or there is a queue.
        """
        self._set_state(fleet, fleet.running_requests)

    def state_committed(self, fleet: FleetState) -> None:
        """What is placed on each engine, over the next HORIZON_S seconds: its backlog, and its
        streams for as long as they are expected to stay.

        Streams still to come are left out, as where they go is what is being decided. The forecast
        shares them out as placements went lately, so that an engine which got many is expected to
        get many: decisions that look at that answer to earlier decisions, and swing.
        """
        np.multiply(fleet.running_requests, fleet.stream_stay, out=self._work)
        self._set_state(fleet, self._work)

    def state_expected(self, fleet: FleetState) -> None:
        """Utilisation and memory as the forecast has them, mean of its columns, with streams still
        to come; memory is at least what is measured. `state_now` where nobody keeps a forecast (all
        its columns are zero)."""
        util, mem = self.util, self.mem
        np.dot(fleet.forecast_util, _MEAN, out=util)
        if not util[util.argmax()] > 0.0:
            self.state_now(fleet)
            return
        np.dot(fleet.forecast_mem, _MEAN, out=mem)
        np.maximum(mem, fleet.kv_used_fraction, out=mem)
        np.add(self.state, self.added, out=self.after)

    def _set_state(self, fleet: FleetState, streams: Floats) -> None:
        util, mem = self.util, self.mem
        np.divide(self.backlog_s, self._window_s, out=util)
        util += np.divide(streams, fleet.places, out=self._work)
        beside_neighbours(fleet, util)
        np.divide(fleet.queued_context, fleet.kv_tokens, out=mem)
        mem += fleet.kv_used_fraction
        np.add(self.state, self.added, out=self.after)

    def _fill_decode_step(self, fleet: FleetState) -> None:
        """A step without the prefill that is in it now, with the streams that still wait: what a
        token will take once the queue is empty."""
        step_s, work = self.decode_step_s, self._work
        np.multiply(fleet.in_flight_prefill_tokens, fleet.prefill_s_per_token, out=work)
        np.subtract(fleet.expected_step_s, work, out=step_s)
        np.maximum(step_s, self._step_s_min, out=step_s)
        np.multiply(fleet.waiting_requests, fleet.decode_s_per_request, out=work)
        step_s += work

    def _fill_added(self, fleet: FleetState, request: PlacementRequest) -> None:
        """Its prefill, and a place while it decodes: for its expected output, which may end within
        the window. That it begins later is left out."""
        util, mem = self.util_added, self.mem_added
        np.multiply(self.decode_step_s, self.output, out=util)
        np.minimum(util, self._window_s, out=util)
        util /= fleet.places
        util += self.own_s
        util /= self._window_s
        added_beside_neighbours(fleet, util)
        # Held prefixes too: blocks that only the cache holds are counted as free.
        mem[:] = request.prompt_tokens + request.expected_output_tokens
        mem /= fleet.kv_tokens

    def _resize(self, engines: int) -> None:
        self.engines = engines
        self.output = 1.0
        """Expected output tokens, at least 1."""
        self.own: Floats = np.zeros(engines)
        """Prompt tokens to compute there."""
        self.backlog_s, self.own_s, self.decode_step_s = np.zeros((3, engines))
        """Prefill that waits there; that of the request; a step without prefill. All in seconds."""
        self.added: Floats = np.zeros((2, engines))
        """Utilisation, and share of KV when the stream has its whole expected length (0 where the
        capacity is not known), that the request adds: shape (2, engines)."""
        self.util_added, self.mem_added = self.added
        self.state: Floats = np.zeros((2, engines))
        """Utilisation and share of KV without the request."""
        self.util, self.mem = self.state
        self.after: Floats = np.zeros((2, engines))
        """Both with the request."""
        self._work: Floats = np.zeros(engines)
        # Constants as arrays: numpy turns a Python number into one at every operation.
        self._window_s = np.full(engines, WINDOW_S)
        self._step_s_min = np.full(engines, STEP_S_MIN)
