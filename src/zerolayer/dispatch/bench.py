"""How fast decisions are: rate and percentiles in process, with load that changes between them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.core.ports import Rng
from zerolayer.dispatch.policies import ExpectedWait, PlacementRequest, Policy

DECISIONS = 20_000
"""Decisions per fleet size: the p99 then rests on 200 of them."""
WARM_UP = 500
STREAMS_PER_ENGINE = 8
"""Streams that run at a time; the oldest ends for each one that starts."""
PROMPT_TOKENS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class DispatchFigures:
    """One fleet size. A decision is choose, and the fleet's counts brought up to date by it."""

    engines: int
    decisions: int
    decisions_per_s: float
    """Over the whole loop: choose, place, and the end of an older stream."""
    p50_us: float
    p99_us: float
    max_us: float
    """Of choose and place together, in microseconds."""
    spread: int
    """Most minus fewest streams on an engine at the end."""


def measure_dispatch(
    engines: Sequence[int],
    clock_ns: Callable[[], int],
    rng: Rng,
    *,
    decisions: int = DECISIONS,
    make_policy: Callable[[], Policy] = ExpectedWait,
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
    fleet = _fleet(engines, rng)
    requests = [
        PlacementRequest(1 + rng.randrange(PROMPT_TOKENS_MAX), 1 + rng.randrange(256))
        for _ in range(1024)
    ]
    running: deque[tuple[int, int]] = deque()
    _run(fleet, policy, requests, running, clock_ns, WARM_UP)
    begun_ns = clock_ns()
    taken_ns = _run(fleet, policy, requests, running, clock_ns, decisions)
    seconds = max(1, clock_ns() - begun_ns) / 1e9
    p50, p99, top = np.quantile(np.array(taken_ns, dtype=np.float64), (0.5, 0.99, 1.0)) / 1e3
    load = fleet.running_requests
    return DispatchFigures(
        engines, decisions, decisions / seconds, float(p50), float(p99), float(top),
        int(load.max() - load.min()),
    )  # fmt: skip


def _run(
    fleet: FleetState,
    policy: Policy,
    requests: Sequence[PlacementRequest],
    running: deque[tuple[int, int]],
    clock_ns: Callable[[], int],
    decisions: int,
) -> list[int]:
    """Place `decisions` streams; returns the ns that each took."""
    taken_ns = []
    nobody: frozenset[int] = frozenset()
    for number in range(decisions):
        request = requests[number % len(requests)]
        before_ns = clock_ns()
        decision = policy.choose(fleet, request, nobody)
        assert decision is not None
        fleet.placed(decision.engine, request.prompt_tokens)
        taken_ns.append(clock_ns() - before_ns)
        running.append((decision.engine, request.prompt_tokens))
        if len(running) > STREAMS_PER_ENGINE * fleet.engines:
            _oldest_ends(fleet, running)
    return taken_ns


def _oldest_ends(fleet: FleetState, running: deque[tuple[int, int]]) -> None:
    engine, prompt_tokens = running.popleft()
    fleet.first_token(engine, prompt_tokens)
    fleet.released(engine, waiting_tokens=0, running_tokens=prompt_tokens)


def _fleet(engines: int, rng: Rng) -> FleetState:
    """Engines that differ a little, as real ones do; every other one with a known, half-used KV
    cache."""
    fleet = FleetState(engines)
    for engine in range(engines):
        fleet.set_standing(engine, accepts=True)
        fleet.set_capacity(engine, requests_max=64, kv_tokens=100_000)
        step_s = 0.02 + 0.002 * rng.random()
        fleet.report(engine, EngineReport(0.5 * (engine % 2), 0, step_s, 2e-4, 2e-4))
    return fleet
