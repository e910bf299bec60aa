"""The load heat map of the next seconds: what traffic taught, and what it says of each engine.

Utilisation and memory are as `request_cost` defines them. A forecast is the sum of three parts:
streams that run (they survive as `OutputLengths` say and grow by a token a step), streams that wait
(the backlog is worked off in order at one second per second), and streams that are still to come
(`Inflow.forecast`, shared out as placements were lately). What the sum lacks on average over the
fleet is measured and made up for (`calibration`). Other programs on an engine's GPU are taken to go
on as they do (`neighbours`).
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Bools, FleetState, Floats, Ints
from zerolayer.dispatch.calibration import Calibration, FleetLoad
from zerolayer.dispatch.inflow import HISTORY_S, Inflow
from zerolayer.dispatch.neighbours import beside_neighbours
from zerolayer.dispatch.output_lengths import OutputLengths
from zerolayer.dispatch.policies.base import PlacementRequest, Policy
from zerolayer.dispatch.request_cost import (
    PredictionErrors,
    busy_share,
    decode_places,
    decode_step_s,
    decode_tokens_per_s,
    prefill_demand,
)

NOBODY: frozenset[int] = frozenset()
NOWHERE = -1
"""Engine number in `place_batch` for a request that none may take."""
BATCH_REQUESTS = 300
"""Requests that the batch form looks ahead."""
EQUAL_SHARE_PLACEMENTS = 4.0
"""Placements per engine that count for equal shares of inflow, beside those that were seen."""
STAY_PRIOR_STREAMS = 2.0
COMPUTED_PRIOR_TOKENS = 2_000.0
"""Prompt tokens that count as computed in full, before prefix hits are believed."""

_BEGINS = np.arange(HORIZON_S, dtype=np.float64)
_AGES = np.arange(HORIZON_S + 1, dtype=np.float64)
_WINDOWS = range(HORIZON_S)
_PER_ENGINE = (
    "_placements", "_tokens", "_pure_step_s", "_places", "_backlog_s", "_demand", "_rate", "_alive",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Streams:
    """Every placed stream, one element each; those of one engine in the order of their coming."""

    engine: Ints
    context_tokens: Floats
    """Prompt and delivered tokens."""
    delivered: Floats
    waiting_tokens: Floats
    """Prompt tokens still to compute; 0 for a stream that decodes."""

    def those(self, mask: Bools) -> "Streams":
        """The streams that `mask` has, in the same order."""
        if mask.all():
            return self
        at = np.flatnonzero(mask)
        return Streams(
            self.engine[at], self.context_tokens[at], self.delivered[at], self.waiting_tokens[at]
        )

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int]]) -> "Streams":
        """From one row (engine, context, delivered, waiting tokens) per stream."""
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
        return Streams(columns[:, 0].astype(np.int64), *columns[:, 1:].T)


NO_STREAMS = Streams.of(())


class Outlook:
    """Everything that is learned from traffic, and the forecast columns made of it."""

    def __init__(self, engines: int) -> None:
        self.lengths = OutputLengths()
        self.inflow = Inflow()
        self.ttft_errors = PredictionErrors()
        """Predicted against actual TTFT of placements."""
        self._refreshed_ns: int | None = None
        self._placements = [0.0] * engines  # lately, decaying
        self._tokens = [0.0] * engines  # of their prompts, computed there
        self._prompted = 0.0  # all of their prompts
        self._came_s = 0.0  # seconds of prefill placed since the start
        self._calibration = Calibration()
        self._pure_step_s = [float("inf")] * engines  # last seen without prefill
        self._places = [256.0] * engines
        self._backlog_s = [0.0] * engines
        self._demand = [[0.0] * HORIZON_S for _ in range(engines)]
        self._rate = [20.0] * engines
        self._alive = [[1.0] * (HORIZON_S + 1) for _ in range(engines)]
        self._view(FleetState(engines))

    def resize(self, fleet: FleetState) -> None:
        """`fleet` got or lost its last engines: keep what is known of the others."""
        fresh = Outlook(fleet.engines)
        for name in _PER_ENGINE:
            known = getattr(self, name)[: fleet.engines]
            setattr(self, name, [*known, *getattr(fresh, name)[len(known) :]])
        self._view(fleet)

    # -- what traffic teaches -------------------------------------------------------------------

    def arrived(self, now_ns: int, prompt_tokens: int) -> None:
        """A request came, wherever it will be placed."""
        self.inflow.arrived(now_ns, prompt_tokens)

    def finished(self, output_tokens: int) -> None:
        """An answer came to its own end after this many tokens."""
        self.lengths.observe(output_tokens)

    def expected_output(self, delivered: int = 0) -> float:
        """E[tokens still to come | `delivered` have come]; at least 1."""
        return self.lengths.expected_remaining(delivered)

    # -- the forecast ---------------------------------------------------------------------------

    def placed(self, fleet: FleetState, engine: int, request: PlacementRequest) -> None:
        """Add what a placement brings to its engine's forecast.

        The same model as `refresh`, for one stream and without array operations: it is part of
        every dispatch decision. What neighbours take is left out until the next refresh.
        """
        if fleet.forecast_util is not self._viewed:
            self.resize(fleet)
        prompt = request.prompt_tokens
        held = request.held_tokens.get(engine, 0) if request.held_tokens else 0
        own = max(1, prompt - held) if held > 0 else max(1, prompt)
        self._placements[engine] += 1.0
        self._prompted += prompt
        self._tokens[engine] += own
        own_s = own * fleet.prefill_s_per_token.item(engine)
        self._came_s += own_s
        start_s = self._backlog_s[engine] = self._backlog_s[engine] + own_s
        cell = engine * HORIZON_S
        _add_demand(self._demand[engine], own_s, self._util_cells, cell)
        if start_s < HORIZON_S:
            self._add_stream(engine, prompt, start_s, fleet.kv_tokens.item(engine))

    def refresh(self, now_ns: int, fleet: FleetState, streams: Streams) -> None:
        """Recompute all forecast columns. Call it every 100 to 250 ms."""
        if fleet.forecast_util is not self._viewed:
            self.resize(fleet)
        self._forget(now_ns)
        expected, shares = self.inflow.forecast(now_ns), self._shares(fleet)
        decode = streams.those(streams.waiting_tokens == 0.0)
        wait = streams.those(streams.waiting_tokens > 0.0)
        backlog_s, starts_s = _queue(fleet, wait)
        demand = prefill_demand(backlog_s, _arriving_s(fleet, expected, shares))
        places = decode_places(fleet)
        rate = decode_tokens_per_s(self._decode_step_s(fleet), busy_share(demand))
        fleet.set_places(places)
        self.lengths.running(decode.delivered, float(expected[:, 0].mean()))
        left, tokens = self._survivors(decode, rate, None)
        started, new_tokens = self._survivors(wait, rate, starts_s)
        came, came_tokens = self._newcomers(expected, shares, rate, backlog_s)
        fleet.forecast_util[:] = demand + (left + started + came) / places[:, None]
        fleet.forecast_mem[:] = (tokens + new_tokens + came_tokens) / fleet.kv_tokens[:, None]
        fleet.stream_stay[:] = _stay(streams.engine, left + started)
        now = self._add_unexplained(fleet, decode, left, backlog_s, places)
        said = np.array((fleet.forecast_util.mean(axis=0), fleet.forecast_mem.mean(axis=0)))
        factors = self._calibration.factors(now_ns, now, said)
        fleet.forecast_util *= factors[0]
        fleet.forecast_mem *= factors[1]
        beside_neighbours(fleet, fleet.forecast_util)
        self._places, self._rate = places.tolist(), rate.tolist()
        self._backlog_s, self._demand = backlog_s.tolist(), demand.tolist()
        self._alive = self.lengths.survival_at(rate[:, None] * _AGES).tolist()

    def place_batch(
        self, fleet: FleetState, requests: Sequence[PlacementRequest], policy: Policy
    ) -> Ints:
        """Where `policy` sends these requests if they all come now, one after the other.

        Returns engine numbers, NOWHERE for what none may take. `fleet` and the forecast stay as
        they are; the policy's own turns go on, so give it one that serves nothing else.
        """
        trial, outlook = deepcopy(fleet), self._trial()
        engines = np.full(len(requests), NOWHERE, dtype=np.int64)
        for number, request in enumerate(requests):
            decision = policy.choose(trial, request, NOBODY)
            if decision is None:
                continue
            engines[number] = decision.engine
            outlook.placed(trial, decision.engine, request)
            trial.placed(decision.engine, request.prompt_tokens)
        return engines

    def next_requests(self, count: int = BATCH_REQUESTS) -> list[PlacementRequest]:
        """The requests that are most likely next: prompt lengths as they came last, oldest first.

        Fewer than `count` where fewer came.
        """
        output = int(self.expected_output())
        return [PlacementRequest(prompt, output) for prompt in list(self.inflow.prompts)[-count:]]

    # -- inside ---------------------------------------------------------------------------------

    def _trial(self) -> "Outlook":
        """A copy for `placed` alone: it shares what it only reads."""
        trial = copy(self)
        trial._placements, trial._tokens = list(self._placements), list(self._tokens)
        trial._backlog_s = list(self._backlog_s)
        trial._demand = [list(demand) for demand in self._demand]
        return trial

    def _view(self, fleet: FleetState) -> None:
        """Cells of the forecast columns, row after row: numpy's own access costs a microsecond."""
        self._viewed = fleet.forecast_util
        self._util_cells: Any = fleet.forecast_util.reshape(-1).data
        self._mem_cells: Any = fleet.forecast_mem.reshape(-1).data

    def _add_stream(self, engine: int, prompt: int, start_s: float, kv_tokens: float) -> None:
        """A stream with this prompt decodes from `start_s` on: its place and its KV."""
        util, mem, cell = self._util_cells, self._mem_cells, engine * HORIZON_S
        alive, rate, places = self._alive[engine], self._rate[engine], self._places[engine]
        for window in range(int(start_s), HORIZON_S):
            end_s = window + 1.0 - start_s
            active = end_s if end_s < 1.0 else 1.0
            age_s = end_s - 0.5 * active
            whole = int(age_s)
            here = active * (alive[whole] + (age_s - whole) * (alive[whole + 1] - alive[whole]))
            util[cell + window] += here / places
            mem[cell + window] += here * (prompt + age_s * rate) / kv_tokens

    def _forget(self, now_ns: int) -> None:
        before = now_ns if self._refreshed_ns is None else self._refreshed_ns
        self._refreshed_ns = now_ns
        keep = float(np.exp(-max(0, now_ns - before) / (HISTORY_S * 1e9)))
        self._placements = [count * keep for count in self._placements]
        self._tokens = [count * keep for count in self._tokens]
        self._prompted *= keep

    def _survivors(
        self, streams: Streams, rate: Floats, starts_s: Floats | None
    ) -> tuple[Floats, Floats]:
        """Per engine and window: how many of these streams are expected to decode, and the KV
        tokens that they then hold. `starts_s`: seconds until each decodes; None for now.

        Window by window: arrays of one number per stream stay in the cache of a core.
        """
        count, engine = len(rate), streams.engine
        alive_sums, held_sums = np.zeros((2, count, HORIZON_S))
        if not engine.size:
            return alive_sums, held_sums
        rates = rate[engine]
        share = 1.0 / np.maximum(self.lengths.survival_at(streams.delivered), 1e-12)
        for window in _WINDOWS:
            active, age_s = _within(window, starts_s)
            grown = rates * age_s
            # A stream that was moved has delivered some already.
            alive = self.lengths.survival_at(streams.delivered + grown)
            alive *= share
            alive *= active
            grown += streams.context_tokens
            grown *= alive
            alive_sums[:, window] = np.bincount(engine, weights=alive, minlength=count)
            held_sums[:, window] = np.bincount(engine, weights=grown, minlength=count)
        return alive_sums, held_sums

    def _decode_step_s(self, fleet: FleetState) -> Floats:
        """As `decode_step_s`; where a prefill is under way, at most what it was without one."""
        step_s = decode_step_s(fleet)
        pure = fleet.in_flight_prefill_tokens <= 0.0
        step_s = np.where(pure, step_s, np.minimum(step_s, np.array(self._pure_step_s)))
        self._pure_step_s = np.where(pure, step_s, np.array(self._pure_step_s)).tolist()
        return step_s

    def _shares(self, fleet: FleetState) -> Floats:
        """Each engine's share of requests, and its share of prompt tokens in tokens to compute.

        As placements went lately: a policy may send long prompts to some and short ones to others.
        Shape (2, engines).
        """
        lately = np.array((self._placements, self._tokens))
        total = lately.sum(axis=1)
        equal = EQUAL_SHARE_PLACEMENTS * np.array((1.0, (total[1] + 1.0) / (total[0] + 1.0)))
        counts = (lately + equal[:, None]) * fleet.accepts
        shares: Floats = counts / np.maximum(1e-9, counts.sum(axis=1, keepdims=True))
        computed = COMPUTED_PRIOR_TOKENS + total[1]
        shares[1] *= computed / (COMPUTED_PRIOR_TOKENS + self._prompted)
        return shares

    def _newcomers(
        self, expected: Floats, shares: Floats, rate: Floats, backlog_s: Floats
    ) -> tuple[Floats, Floats]:
        """Per engine and window: streams still to come that decode by then, and their KV tokens."""
        middle_s = np.maximum(0.0, _BEGINS + 0.5 - backlog_s[:, None])
        oldest = np.maximum(1e-6, middle_s * rate[:, None])  # tokens of the first of them by then
        alive = self.lengths.survival_sum(oldest) / oldest  # they come evenly, so the mean over age
        come = np.vstack((np.zeros(2), expected.cumsum(axis=0)))
        streams = shares[0][:, None] * np.interp(middle_s, _AGES, come[:, 0]) * alive
        prompts = shares[1][:, None] * np.interp(middle_s, _AGES, come[:, 1]) * alive
        return streams, prompts + streams * 0.5 * oldest

    def _add_unexplained(
        self,
        fleet: FleetState,
        decode: Streams,
        left: Floats,
        backlog_s: Floats,
        places: Floats,
    ) -> FleetLoad:
        """Memory that is measured now and not explained by streams (shared prefixes, part-filled
        blocks) goes as the running streams end. Returns the load of now."""
        running = np.bincount(decode.engine, minlength=fleet.engines)
        share_left = left / np.maximum(1.0, running)[:, None]
        context = np.bincount(decode.engine, weights=decode.context_tokens, minlength=fleet.engines)
        explained = context / fleet.kv_tokens
        mem = np.where(fleet.kv_used_fraction > 0.0, fleet.kv_used_fraction, explained)
        fleet.forecast_mem += (mem - explained)[:, None] * share_left
        np.maximum(fleet.forecast_mem, 0.0, out=fleet.forecast_mem)
        return FleetLoad(
            backlog_s=float(backlog_s.mean()),
            came_s=self._came_s / fleet.engines,
            decoding=float((running / places).mean()),
            mem=float(mem.mean()),
        )


def _arriving_s(fleet: FleetState, expected: Floats, shares: Floats) -> Floats:
    """Seconds of prefill that come to each engine in each window."""
    arriving_s: Floats = (shares[1] * fleet.prefill_s_per_token)[:, None] * expected[:, 1]
    return arriving_s


def _queue(fleet: FleetState, wait: Streams) -> tuple[Floats, Floats]:
    """(seconds of backlog per engine, seconds until each of these streams decodes). First come,
    first served."""
    order = np.argsort(wait.engine, kind="stable")
    engine = wait.engine[order]
    work_s = wait.waiting_tokens[order] * fleet.prefill_s_per_token[engine]
    backlog_s = np.bincount(engine, weights=work_s, minlength=fleet.engines).astype(np.float64)
    before_s = np.concatenate(([0.0], np.cumsum(backlog_s)[:-1]))
    starts_s = np.empty(len(order))
    starts_s[order] = np.cumsum(work_s) - before_s[engine]
    return backlog_s, starts_s


def _within(window: int, starts_s: Floats | None) -> tuple[Any, Any]:
    """Of each stream: the share of a window in which it decodes, and the seconds that it decodes
    until the middle of these; plain numbers where all decode from now on."""
    if starts_s is None:
        return 1.0, window + 0.5
    active = np.clip(window + 1.0 - starts_s, 0.0, 1.0)
    return active, np.maximum(0.0, window + 1.0 - 0.5 * active - starts_s)


def _stay(engine: Ints, decoding: Floats) -> Floats:
    """`FleetState.stream_stay` from how many streams decode in each window, shape (engines,
    HORIZON_S). Where there are few, what holds for the fleet counts as STAY_PRIOR_STREAMS more."""
    count = np.bincount(engine, minlength=len(decoding)).astype(np.float64)
    there = decoding.mean(axis=1)
    usual = there.sum() / count.sum() if engine.size else 1.0
    stay: Floats = (there + STAY_PRIOR_STREAMS * usual) / (count + STAY_PRIOR_STREAMS)
    return stay


def _add_demand(demand: list[float], own_s: float, util: Any, first_cell: int) -> None:
    """Add `own_s` seconds of backlog to an engine's prefill demand, and that to its utilisation.

    The recursion of `prefill_demand`, for one engine.
    """
    extra = own_s
    for window in _WINDOWS:
        before = demand[window]
        after = demand[window] = before + extra
        util[first_cell + window] += extra
        if after <= 1.0:
            return
        extra = after - 1.0 if before <= 1.0 else extra
