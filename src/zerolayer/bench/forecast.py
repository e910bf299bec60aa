"""Measures the forecasts of `dispatch.outlook` on public traces, against "no change" and averages.

Inflow needs arrivals alone: as recorded, and as for a whole fleet at a target utilisation, which is
as many copies of the trace as that takes, each shifted in time (squeezing the trace would turn its
minutes into seconds). Utilisation and memory need engines: the simulator runs the product's driver
and policy without faults, and each second what the outlook said is put beside what came. Only the
second half of the time is scored; the two constants of `dispatch.inflow` come from first halves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from zerolayer.bench.skill import Skill, Subject, measured_skill
from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import HORIZON_S, FleetState, Floats
from zerolayer.core.limits import ENGINES_MAX
from zerolayer.dispatch.inflow import Inflow
from zerolayer.dispatch.outlook import Outlook
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.request_cost import PredictionError, decode_places
from zerolayer.sim.capacity import capacity, fitting
from zerolayer.sim.fleet import EventKind, SimFleet
from zerolayer.sim.plan import UTILISATION_MAX
from zerolayer.sim.profiles import EngineKind, profile_of
from zerolayer.sim.results import RunKey
from zerolayer.sim.run import RunSpec, fleet_of
from zerolayer.sim.traces import Trace, load_trace

SECOND_NS = 1_000_000_000
SECONDS_MIN = 60
"""Below, the scored half says nothing."""
Watch = Callable[[float], None]
"""Gets the share of one trace that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """What to measure."""

    engines: int = 16
    utilisation: float = 0.7
    """Share of what the fleet sustains that is offered to it."""
    policy: str = "zerolayer"
    seed: int = 0
    seconds: int = 300
    """Of the fleet's traffic; half of them are scored."""
    kind: EngineKind = field(default_factory=EngineKind)

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if not 1 <= self.engines <= ENGINES_MAX:
            raise ConfigError("--engines", self.engines, f"give 1 to {ENGINES_MAX}")
        if not 0.0 < self.utilisation <= UTILISATION_MAX:
            fix = f"give a share above 0 and up to {UTILISATION_MAX:g}, like 0.7"
            raise ConfigError("--utilisation", self.utilisation, fix)
        if self.seconds < SECONDS_MIN:
            raise ConfigError("--seconds", self.seconds, f"give {SECONDS_MIN} or more")


@dataclass(frozen=True, slots=True)
class TraceForecast:
    """One trace."""

    skills: list[Skill]
    ttft: PredictionError
    """Predicted against actual TTFT in the simulated run, as shares of the actual."""


def measure_trace(name: str, options: ForecastOptions, watch: Watch) -> TraceForecast:
    """Measure one trace. Raises ConfigError for a trace, policy or engine that is not there, and
    for a trace shorter than SECONDS_MIN."""
    recorded = load_trace(name)
    if recorded.duration_s < SECONDS_MIN:
        fix = f"it lasts {recorded.duration_s:.0f} s; give one of {SECONDS_MIN} s or more"
        raise ConfigError("--trace", name, fix)
    fits = fitting(recorded, options.kind)
    one = capacity(profile_of(options.kind), fits)
    rate = options.utilisation * options.engines * one
    skills = list(_of_inflow(recorded, "recorded"))
    watch(0.2)
    traffic = fleet_traffic(fits, rate, options.seconds)
    skills += _of_inflow(traffic, "fleet")
    watch(0.3)
    key = RunKey(
        name, options.policy, "snapshot", options.utilisation, "none", options.engines,
        options.seed,
    )  # fmt: skip
    probe = _Probe(fleet_of(RunSpec(traffic, key, options.kind, rate)), traffic.duration_s)
    probe.fleet.run(lambda share: watch(0.3 + 0.7 * share))
    for quantity, (actual, said) in probe.quantities().items():
        skills.append(measured_skill(_subject(traffic, "fleet", quantity), actual, said))
    return TraceForecast(skills, probe.fleet.driver.outlook.ttft_errors.percentiles())


def fleet_traffic(trace: Trace, requests_per_s: float, seconds: int) -> Trace:
    """The first requests of as many copies of `trace` as make about this rate, at just this rate:
    `seconds` of it, or fewer where the trace ends.

    Copy k of K begins k / K of the trace's duration later and wraps around at its end. Its prefixes
    are its own: copies stand for other users.
    """
    duration_s = max(trace.duration_s, 1.0)
    copies = max(1, round(requests_per_s * duration_s / len(trace)))
    shifts = np.repeat(np.arange(copies), len(trace)) * (duration_s / copies)
    arrival = (np.tile(trace.arrival_s, copies) + shifts) % duration_s
    order = np.argsort(arrival, kind="stable")
    order = order[: int(requests_per_s * seconds)]
    rows, copy = order % len(trace), order // len(trace)
    prefixes = None
    if trace.prefixes is not None:
        own = 1 + max((max(blocks, default=0) for blocks in trace.prefixes), default=0)
        prefixes = tuple(
            tuple(block + own * number for block in trace.prefixes[row])
            for row, number in zip(rows.tolist(), copy.tolist(), strict=True)
        )
    mixed = Trace(
        trace.name, arrival[order] - arrival[order[0]], trace.prompt_tokens[rows],
        trace.output_tokens[rows], prefixes, trace.block_tokens,
    )  # fmt: skip
    return mixed.at_rate(requests_per_s)


def _of_inflow(trace: Trace, rate: str) -> Iterator[Skill]:
    counts = _per_second(trace)
    said = _said_of_inflow(trace, len(counts))
    for column, quantity in enumerate(("requests", "prompt_tokens")):
        subject = _subject(trace, rate, quantity)
        yield measured_skill(
            subject, counts[:, column : column + 1], said[:, :, column : column + 1]
        )


def _subject(trace: Trace, rate: str, quantity: str) -> Subject:
    requests = _per_second(trace)[:, 0]
    return Subject(
        trace.name, rate, quantity, float(requests.mean()), float(requests.var() / requests.mean())
    )


def _per_second(trace: Trace) -> Floats:
    """Requests and prompt tokens of each whole second, shape (T, 2)."""
    seconds = max(1, int(trace.duration_s))
    second = trace.arrival_s.astype(np.int64)
    within = second < seconds
    counts = [
        np.bincount(second[within], weights=weights, minlength=seconds)
        for weights in (None, trace.prompt_tokens[within].astype(np.float64))
    ]
    return np.stack(counts, axis=1).astype(np.float64)


def _said_of_inflow(trace: Trace, seconds: int) -> Floats:
    """What `Inflow` says at the end of each second, shape (seconds, HORIZON_S, 2)."""
    inflow = Inflow()
    said = np.zeros((seconds, HORIZON_S, 2))
    ends = np.searchsorted(trace.arrival_s, np.arange(1, seconds + 1))
    prompts = trace.prompt_tokens.tolist()
    at_ns = (trace.arrival_s * SECOND_NS).astype(np.int64).tolist()
    inflow.per_second(0)
    begin = 0
    for second, end in enumerate(ends.tolist()):
        for row in range(begin, end):
            inflow.arrived(at_ns[row], prompts[row])
        said[second] = inflow.forecast((second + 1) * SECOND_NS)
        begin = end
    return said


class _NotingOutlook(Outlook):
    """Also keeps the seconds of prefill that came to each engine."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self.came_s = np.zeros(engines)

    def placed(self, fleet: FleetState, engine: int, request: PlacementRequest) -> None:
        """See Outlook."""
        super().placed(fleet, engine, request)
        held = (request.held_tokens or {}).get(engine, 0)
        own = max(1, request.prompt_tokens - held)
        self.came_s[engine] += own * fleet.prefill_s_per_token[engine]


class _Probe:
    """Looks at a simulated fleet once a second: what was said, and what came."""

    def __init__(self, fleet: SimFleet, until_s: float) -> None:
        self.fleet = fleet
        self._outlook = fleet.driver.outlook = _NotingOutlook(fleet.driver.fleet.engines)
        self._until_s = until_s
        self._streams_s = self._backlog_s = self._used = np.zeros(fleet.driver.fleet.engines)
        self._util: list[Floats] = []
        self._mem: list[Floats] = []
        self._said: list[tuple[Floats, Floats]] = []
        fleet.at(1.0, EventKind.SAMPLE, 0, self._look)

    def quantities(self) -> dict[str, tuple[Floats, Floats]]:
        """(actual, said) of each quantity, over the seconds in which requests came."""
        util, mem = ([columns[number].T for columns in self._said] for number in (0, 1))
        return {
            "utilisation": (np.array(self._util), np.array(util)),
            "memory": (np.array(self._mem), np.array(mem)),
        }

    def _look(self) -> None:
        driver, now = self.fleet.driver, self.fleet.now
        if now > self._until_s:
            return
        for engine in self.fleet.engines:  # engines hand tokens out in lots; a live one does not
            engine.let_go(now)
            self.fleet.hand_over(engine.slot)
        self._note_actual(now)
        self._outlook.refresh(
            self.fleet.clock.monotonic_ns(), driver.fleet, driver.placed_streams()
        )
        self._said.append((driver.fleet.forecast_util.copy(), driver.fleet.forecast_mem.copy()))
        self.fleet.at(now + 1.0, EventKind.SAMPLE, 0, self._look)

    def _note_actual(self, now: float) -> None:
        """Utilisation as `request_cost` defines it, and memory, over the second that ends now."""
        fleet, engines = self.fleet.driver.fleet, self.fleet.engines
        streams_s = np.array([engine.stream_seconds(now) for engine in engines])
        decoding = streams_s - self._streams_s
        self._util.append(self._backlog_s + self._outlook.came_s + decoding / decode_places(fleet))
        used = np.array([engine.kv.used / engine.kv.capacity for engine in engines])
        self._mem.append(0.5 * (self._used + used))
        self._used = used
        self._streams_s = streams_s
        self._backlog_s = fleet.waiting_tokens * fleet.prefill_s_per_token
        self._outlook.came_s[:] = 0.0
