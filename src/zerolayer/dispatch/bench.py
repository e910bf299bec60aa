"""How fast decisions are: rate and percentiles in process, with load that changes between them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.core.ports import Rng
from zerolayer.dispatch.outlook import Outlook, Streams
from zerolayer.dispatch.policies import PlacementRequest, Policy
from zerolayer.dispatch.policies.zerolayer import ZeroLayer

DECISIONS = 20_000
"""Decisions per fleet size: the p99 then rests on 200 of them."""
WARM_UP = 500
STREAMS_PER_ENGINE = 8
"""Streams that run at a time; the oldest ends for each one that starts."""
PROMPT_TOKENS_MAX = 2_000
OUTPUT_TOKENS_MAX = 256
REFRESH_NS = 200_000_000
"""Time that passes for the forecast between two refreshes."""
LINK_USE_MAX = 0.5


@dataclass(frozen=True, slots=True)
class DispatchFigures:
    """One fleet size. A decision is all of it: expected wait, expected load of the next seconds,
    entropy, limits, and counts and forecast brought up to date by it. Not in it is the forecast's
    own refresh, which runs a few times a second however many decisions there are."""

    engines: int
    decisions: int
    decisions_per_s: float
    """Over the whole loop: choose, place, forecast, and the end of an older stream."""
    p50_us: float
    p99_us: float
    max_us: float
    """Of choose, place and forecast together, in microseconds."""
    spread: int
    """Most minus fewest streams on an engine at the end."""


def measure_dispatch(
    engines: Sequence[int],
    clock_ns: Callable[[], int],
    rng: Rng,
    *,
    decisions: int = DECISIONS,
    make_policy: Callable[[], Policy] = ZeroLayer,
) -> list[DispatchFigures]:
    """Measure each fleet size in `engines`. `clock_ns` is a fine monotonic clock (perf_counter_ns).

    Raises ValueError for a fleet size that FleetState refuses or for fewer than one decision.
    """
    if decisions < 1:
        raise ValueError(f"decisions must be at least 1, not {decisions}")
    return [_measure(count, clock_ns, rng, decisions, make_policy()) for count in engines]


def _measure(
    engines: int, clock_ns: Callable[[], int], rng: Rng, decisions: int, policy: Policy
) -> DispatchFigures:
    loop = _Loop(engines, clock_ns, rng, policy)
    loop.run(WARM_UP)
    loop.taken_ns.clear()
    loop.busy_ns = 0
    loop.run(decisions)
    seconds = max(1, loop.busy_ns) / 1e9
    taken_us = np.array(loop.taken_ns, dtype=np.float64) / 1e3
    p50, p99, top = np.quantile(taken_us, (0.5, 0.99, 1.0))
    load = loop.fleet.running_requests
    return DispatchFigures(
        engines, decisions, decisions / seconds, float(p50), float(p99), float(top),
        int(load.max() - load.min()),
    )  # fmt: skip


class _Loop:
    """A fleet, its streams and the policy under measurement."""

    def __init__(self, engines: int, clock_ns: Callable[[], int], rng: Rng, policy: Policy) -> None:
        self.fleet = _fleet(engines, rng)
        self._step_s = self.fleet.expected_step_s.tolist()
        self.taken_ns: list[int] = []
        self.busy_ns = 0
        """Time of all decisions and ends, without refreshes."""
        self._policy = policy
        self._clock_ns = clock_ns
        self._outlook = Outlook(engines)
        self._requests = [
            PlacementRequest(
                1 + rng.randrange(PROMPT_TOKENS_MAX), 1 + rng.randrange(OUTPUT_TOKENS_MAX)
            )
            for _ in range(1024)
        ]
        self._running: deque[tuple[int, int]] = deque()
        self._streams_max = STREAMS_PER_ENGINE * engines
        self._number = 0
        self._now_ns = 0

    def run(self, decisions: int) -> None:
        """Place so many streams; the forecast is renewed when as many were placed as run."""
        while decisions > 0:
            now = min(decisions, self._streams_max)
            begun_ns = self._clock_ns()
            self._place(now)
            self.busy_ns += self._clock_ns() - begun_ns
            self._refresh()
            decisions -= now

    def _place(self, decisions: int) -> None:
        fleet, policy, clock_ns, requests = self.fleet, self._policy, self._clock_ns, self._requests
        nobody: frozenset[int] = frozenset()
        for _ in range(decisions):
            request = requests[self._number % len(requests)]
            self._number += 1
            before_ns = clock_ns()
            decision = policy.choose(fleet, request, nobody)
            assert decision is not None
            self._outlook.placed(fleet, decision.engine, request)
            fleet.placed(decision.engine, request.prompt_tokens)
            self.taken_ns.append(clock_ns() - before_ns)
            self._running.append((decision.engine, request.prompt_tokens))
            if len(self._running) > self._streams_max:
                self._oldest_ends()

    def _oldest_ends(self) -> None:
        engine, prompt_tokens = self._running.popleft()
        self.fleet.first_token(engine, prompt_tokens)
        self.fleet.released(engine, waiting_tokens=0, running_tokens=prompt_tokens)

    def _refresh(self) -> None:
        """Half of the streams decode, the other half waits."""
        self._now_ns += REFRESH_NS
        rows = [
            (engine, prompt, 0, prompt * (number % 2))
            for number, (engine, prompt) in enumerate(self._running)
        ]
        self._outlook.refresh(self._now_ns, self.fleet, Streams.of(rows))
        for engine, running in enumerate(self.fleet.running_requests.tolist()):
            _report(self.fleet, engine, self._step_s[engine], round(running / 2))


def _fleet(engines: int, rng: Rng) -> FleetState:
    """Engines that differ a little, as real ones do; every other one with a known, half-used KV
    cache, all with some traffic on their link."""
    fleet = FleetState(engines)
    for engine in range(engines):
        fleet.set_standing(engine, accepts=True)
        fleet.set_capacity(engine, requests_max=64, kv_tokens=100_000)
        step_s = 0.02 + 0.002 * rng.random()
        _report(fleet, engine, step_s, 0)
        fleet.link_use[engine] = LINK_USE_MAX * rng.random()
    return fleet


def _report(fleet: FleetState, engine: int, step_s: float, admitted: int) -> None:
    used = 0.5 * (engine % 2)
    fleet.report(engine, EngineReport(used, 0, step_s, 2e-5, 2e-4, admitted_requests=admitted))
