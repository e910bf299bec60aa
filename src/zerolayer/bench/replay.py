"""`bench replay`: the same requests on a real fleet and in the simulator, and how far they differ.

The head of a public trace, its lengths capped and its arrivals slowed to what small engines can do,
goes through a live fleet. Then the simulator gets the same arrivals, with engines whose step times
are what that fleet's engines had learned of their own steps meanwhile (`StepCostModel`, mean over
the run and the engines), whose noise is the error of that model, and whose limits are the live
ones. Policy and driver are the product's on both sides. Compared are quantiles of TTFT, of the gaps
between tokens (ITL) and of whole answers.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from zerolayer.bench.compare import gaps_ms
from zerolayer.bench.fleet_process import (
    MAX_MODEL_LEN,
    SERVED_NAME,
    FleetOptions,
    FleetProcess,
)
from zerolayer.bench.narration import lines_on
from zerolayer.bench.open_loop import Arrival, play, requests_of, watched
from zerolayer.bench.server_process import Progress
from zerolayer.bench.stream_client import StreamClient, StreamRecord
from zerolayer.core.errors import ConfigError, EngineError
from zerolayer.core.fleet_state import Floats
from zerolayer.sim.faults import FleetShape, plan_faults
from zerolayer.sim.noise import NoiseLevel
from zerolayer.sim.offloading import Offloading
from zerolayer.sim.profiles import FittedEngine, profile_of
from zerolayer.sim.results import RunKey
from zerolayer.sim.run import RunSpec, fleet_of, offered_rate, run_fleet
from zerolayer.sim.statistics import quantile_of
from zerolayer.sim.traces import Trace, load_trace

POLICY = "zerolayer"
LEARN_REQUESTS = 24
"""Requests of the trace that teach the fleet its step times before the rate is chosen."""
LEARN_AT_A_TIME = 8
LOOK_EVERY_S = 1.0
QUANTILES = (0.5, 0.9, 0.99)
MEASURES = ("ttft_ms", "itl_ms", "answer_ms")
DEVIATIONS_PER_MEDIAN = 1.0 / 0.6745
"""Standard deviation of a normal distribution / median of its absolute values."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to measure."""

    model: str
    trace: str = "azure_2023_conv"
    engines: int = 2
    seconds: float = 120.0
    """About so long come requests."""
    utilisation: float = 0.55
    """Share of what the simulator says that such a fleet sustains."""
    prompt_tokens_max: int = 600
    """Longer prompts of the trace are cut to it."""
    output_tokens_max: int = 60
    """Longer answers are cut to it."""
    runs: int = 5
    """Simulated runs, each with its own noise; their requests are taken together."""
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("engines", self.engines, 1), ("seconds", self.seconds, 5.0), ("runs", self.runs, 1),
            ("utilisation", self.utilisation, 0.05),
            ("prompt-tokens-max", self.prompt_tokens_max, 1),
            ("output-tokens-max", self.output_tokens_max, 2),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")
        longest = self.prompt_tokens_max + self.output_tokens_max
        if longest > MAX_MODEL_LEN:
            fix = f"prompt and answer must fit into {MAX_MODEL_LEN} tokens"
            raise ConfigError("--prompt-tokens-max", self.prompt_tokens_max, fix)


@dataclass
class Learned:
    """What the live engines said of themselves, look by look."""

    models: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds, see `StepCostModel.coefficients`; one per engine and look."""
    errors: list[float] = field(default_factory=list)
    """Median error of each model, as a share."""
    utilisation: list[float] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)

    def take(self, status: dict[str, Any]) -> None:
        """One look at `/zerolayer/status`."""
        rows = status["engines"]
        for row in rows:
            self.models.append(tuple(row["step_model_s"]))
            self.errors.append(row["step_error"]["p50"])
        self.utilisation.append(float(np.mean([row["utilisation"] for row in rows])))
        self.limits = {
            "kv_tokens": rows[0]["demand"]["kv_tokens"],
            "requests_max": rows[0]["demand"]["requests_max"],
            "batch_tokens": status["placement"]["batch_tokens"],
        }

    def engine(self) -> FittedEngine:
        """The engine to simulate: the mean of what was learned, and the live limits."""
        b0, b1, b2, b3, b4 = (float(value) for value in np.mean(self.models, axis=0))
        return FittedEngine(
            (b0, b1, b2, b3, b4), context_tokens_max=MAX_MODEL_LEN,
            kv_tokens=self.limits["kv_tokens"], requests_max=self.limits["requests_max"],
            batch_tokens=self.limits["batch_tokens"],
        )  # fmt: skip

    def noise(self) -> NoiseLevel:
        """Noise of single steps."""
        return NoiseLevel(float(np.mean(self.errors)) * DEVIATIONS_PER_MEDIAN)


@dataclass(frozen=True, slots=True)
class Latencies:
    """What clients saw, in ms."""

    ttft_ms: Floats
    itl_ms: Floats
    answer_ms: Floats
    """From sending to the last token."""


def run_replay(options: ReplayOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError` when the fleet does not come up."""
    options.check()
    say, began = lines_on(console), time.monotonic()
    trace = capped(load_trace(options.trace), options)
    learned = Learned()
    with FleetProcess(FleetOptions(options.model, options.engines), say) as fleet:
        played, records = asyncio.run(_live(fleet, options, trace, learned, say))
    live = live_latencies(records)
    say(f"simulating the same {len(played)} requests, {options.runs} times")
    simulated = simulate(played, options, learned)
    rows = differences(live, simulated)
    for line in table(rows):
        say(line)
    engine = learned.engine()
    return {
        "replay": rows,
        "requests": len(played),
        "requests_per_s": round(len(played) / played.duration_s, 3),
        "mean_prompt_tokens": round(float(played.prompt_tokens.mean()), 1),
        "mean_output_tokens": round(float(played.output_tokens.mean()), 1),
        "utilisation_shown": round(float(np.mean(learned.utilisation)), 3),
        "step_model_s": [float(f"{value:.4g}") for value in engine.b],
        "step_noise": round(learned.noise().deviation, 3),
        "limits": learned.limits,
        "trace": options.trace,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def capped(trace: Trace, options: ReplayOptions) -> Trace:
    """The trace with its lengths cut; arrivals as they are."""
    return replace(
        trace,
        prompt_tokens=np.minimum(trace.prompt_tokens, options.prompt_tokens_max),
        output_tokens=np.minimum(trace.output_tokens, options.output_tokens_max),
        prefixes=None,
        block_tokens=0,
    )


def arrivals_of(trace: Trace) -> list[Arrival]:
    """The requests of a trace."""
    columns = (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    return [Arrival(at_s, prompt, output) for at_s, prompt, output in zip(*columns, strict=True)]


async def _live(
    fleet: FleetProcess, options: ReplayOptions, trace: Trace, learned: Learned, say: Progress
) -> tuple[Trace, list[StreamRecord]]:
    """What was sent, with the arrivals as they were sent, and what came."""
    async with StreamClient(fleet.base_url, SERVED_NAME) as client:
        warm = Learned()
        await _teach(client, trace, options.seed)
        warm.take(await client.status())
        rate = offered_rate(_spec(trace, options, warm.engine()))
        count = max(2, round(rate * options.seconds))
        head = trace.head(count).at_rate(rate)
        say(f"{count} requests at {rate:.2f} per second, {head.duration_s:.0f} s")
        arrivals = arrivals_of(head)
        requests = await requests_of(client, arrivals, options.seed)

        def take(_at_ns: int, status: dict[str, Any]) -> None:
            learned.take(status)

        async with watched(client, LOOK_EVERY_S, take):
            records = await play(client, arrivals, requests)
    broken = [record.fault for record in records if record.broken]
    if broken:
        raise EngineError(f"{len(broken)} of {len(records)} streams broke: {broken[0]}")
    sent_ns = np.array([record.sent_ns for record in records])
    return replace(head, arrival_s=(sent_ns - sent_ns[0]) / 1e9), records


async def _teach(client: StreamClient, trace: Trace, seed: int) -> None:
    """Let the engines' cost models see steps like those that will come, on all engines at once."""
    rows = np.linspace(0, len(trace) - 1, LEARN_REQUESTS).astype(np.int64).tolist()
    arrivals = [
        Arrival(0.0, int(trace.prompt_tokens[row]), int(trace.output_tokens[row])) for row in rows
    ]
    waiting = iter(await requests_of(client, arrivals, seed + 1))

    async def one_after_another() -> None:
        for request in waiting:
            await client.run(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(LEARN_AT_A_TIME):
            group.create_task(one_after_another())


def _spec(
    trace: Trace, options: ReplayOptions, engine: FittedEngine, seed: int = 0, rate: float = 0.0
) -> RunSpec:
    key = RunKey(
        trace.name, POLICY, "snapshot", options.utilisation, "none", options.engines, seed
    )  # fmt: skip
    return RunSpec(trace, key, engine, requests_per_s=rate or None)


def simulate(trace: Trace, options: ReplayOptions, learned: Learned) -> Latencies:
    """The same arrivals on modelled engines; no faults, noise as the live engines had it."""
    engine = learned.engine()
    profile = profile_of(engine)
    shape = FleetShape(options.engines, profile.gpus, profile.restart_s)
    rate = len(trace) / trace.duration_s
    found: list[Latencies] = []
    for seed in range(options.seed, options.seed + options.runs):
        spec = _spec(trace, options, engine, seed, rate)
        plan = replace(plan_faults("none", shape, seed, trace.duration_s), noise=learned.noise())
        fleet = fleet_of(spec, plan)
        Offloading(fleet)
        gaps: list[tuple[int, float]] = []
        for each in fleet.engines:
            each.token_gaps = gaps
        result = run_fleet(fleet, spec.key)
        found.append(sim_latencies(result.requests, gaps))
    return Latencies(*(np.concatenate([getattr(f, name) for f in found]) for name in MEASURES))


def sim_latencies(requests: npt.NDArray[Any], token_gaps: Sequence[tuple[int, float]]) -> Latencies:
    """Of REQUEST_ROW rows, and gaps as (how many, seconds of each)."""
    counts = [count for count, _ in token_gaps]
    itl = np.repeat([1e3 * seconds for _, seconds in token_gaps], counts)
    return Latencies(1e3 * requests["ttft_s"], itl, 1e3 * requests["e2e_s"])


def live_latencies(records: Sequence[StreamRecord]) -> Latencies:
    """Of streams that ended by themselves."""
    answers = [(record.arrivals_ns[-1] - record.sent_ns) / 1e6 for record in records]
    itl = [gap for record in records for gap in gaps_ms(record.arrivals_ns)]
    ttft = [record.ttft_ms or 0.0 for record in records]
    return Latencies(np.array(ttft), np.array(itl), np.array(answers))


def differences(live: Latencies, simulated: Latencies) -> list[dict[str, float | str]]:
    """One row per measure and quantile; `difference` = simulated / live - 1."""
    rows: list[dict[str, float | str]] = []
    for name in MEASURES:
        for share in QUANTILES:
            real = quantile_of(getattr(live, name), share)
            ours = quantile_of(getattr(simulated, name), share)
            rows.append(
                {
                    "measure": name,
                    "quantile": share,
                    "live": round(real, 1),
                    "simulated": round(ours, 1),
                    "difference": round(ours / max(real, 1e-9) - 1.0, 3),
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, float | str]]) -> list[str]:
    """Lines for people."""
    lines = [f"{'measure':<10} {'quantile':>8} {'live':>9} {'simulated':>10} {'difference':>11}"]
    for row in rows:
        lines.append(
            f"{row['measure']:<10} {'p' + format(float(row['quantile']) * 100, 'g'):>8} "
            f"{row['live']:>9} {row['simulated']:>10} {float(row['difference']):>+11.0%}"
        )
    return lines
