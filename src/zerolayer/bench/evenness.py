"""`bench evenness`: how evenly a fleet is used under skewed load, by our policy and by vLLM's own.

A few long prompts with long answers come among many short ones. Both sides of a pair of rounds get
the same requests at the same times, the next pair gets others. Rounds alternate A B B A between
`--policy zerolayer` (with offload unless told otherwise) and `--policy vllm_dp --no-offload` (the
score of vLLM's data-parallel client; vLLM moves nothing), each on a fleet of its own.

Utilisation is taken from counts that the fleet reports whatever its policy is, not from its
forecast: util = p + n / n_max in windows of WINDOWS_S seconds. p = seconds of prefill in demand per
second (prompt tokens that waited at the window's begin and that came in it, times the seconds of a
prompt token), n = streams that decode, n_max = how many can at once. The seconds of a prompt token
are one number for all rounds and engines, the median of what the engines learned: what differs
between two rounds is then what was placed where, not what was learned.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from rich.console import Console

from zerolayer.bench.compare import percentile, summary, worst_gap_ms
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess
from zerolayer.bench.narration import lines_on
from zerolayer.bench.open_loop import Arrival, play, requests_of, watched
from zerolayer.bench.stream_client import StreamClient, StreamRecord
from zerolayer.core.errors import ConfigError, EngineError
from zerolayer.core.fleet_state import Floats
from zerolayer.sim.statistics import spread_of

WARM_UP_S = 8.0
"""Of each round, before anything is counted: the fleet's cost models begin without knowledge."""
LOOK_EVERY_S = 0.2
WINDOWS_S = (1.0, 5.0)
"""Utilisation is taken in windows of so many seconds; the first is the headline. A long prompt
loads one engine for a second wherever it is placed, which no policy can share out; the longer
window is the one that the policy itself looks at."""
SHORT_PROMPT, SHORT_ANSWER = (20, 80), (16, 48)
LONG_PROMPT, LONG_ANSWER = (500, 1000), (120, 240)
SIDES = ("zerolayer", "vllm_dp")
ORDER = ("zerolayer", "vllm_dp", "vllm_dp", "zerolayer")
"""Of four rounds: a machine that turns slower or faster meanwhile hits both alike."""


@dataclass(frozen=True)
class EvennessOptions:
    """What to measure."""

    model: str
    engines: int = 2
    rounds: int = 4
    """Of both together, even; each starts a fleet of its own."""
    seconds: float = 40.0
    """Of arrivals in each round, after the warm-up."""
    rate: float = 2.0
    """Requests per second."""
    long_share: float = 0.12
    """Share of requests that are long."""
    offload: bool = True
    """Whether the fleet with our policy moves streams on its own."""
    seed: int = 0

    def words(self, policy: str) -> tuple[str, ...]:
        """For `zerolayer serve`."""
        offload = self.offload and policy == "zerolayer"
        return ("--policy", policy, "--offload" if offload else "--no-offload")

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("engines", self.engines, 2), ("rounds", self.rounds, 2), ("seconds", self.seconds, 5),
            ("rate", self.rate, 0.1),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")
        if self.rounds % 2:
            raise ConfigError("--rounds", self.rounds, "give an even number: both sides in turns")
        if not 0.0 <= self.long_share <= 1.0:
            raise ConfigError("--long-share", self.long_share, "give a share between 0 and 1")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a fleet said of its engines at one moment; a number per engine each."""

    at_s: float
    """Seconds after the first arrival could come."""
    placed_tokens: tuple[int, ...]
    waiting_tokens: tuple[int, ...]
    decoding: tuple[int, ...]
    places: tuple[float, ...]


@dataclass
class Round:
    """What was seen in one round."""

    policy: str
    counts: list[Counts] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    """Seconds per prompt token that each engine had learned at the end."""
    records: list[StreamRecord] = field(default_factory=list)
    """Of requests after the warm-up."""
    tokens_per_s: float = 0.0
    broken: list[str] = field(default_factory=list)
    """What ended streams that did not end by themselves."""
    moves: list[dict[str, Any]] = field(default_factory=list)
    """As the status has them."""


def skewed_load(options: EvennessOptions) -> list[Arrival]:
    """Poisson arrivals, the long ones among them by chance; the same for the same seed."""
    rng = Random(options.seed)
    arrivals: list[Arrival] = []
    at_s = rng.expovariate(options.rate)
    while at_s < WARM_UP_S + options.seconds:
        is_long = rng.random() < options.long_share
        prompt, answer = (LONG_PROMPT, LONG_ANSWER) if is_long else (SHORT_PROMPT, SHORT_ANSWER)
        arrivals.append(Arrival(at_s, rng.randint(*prompt), rng.randint(*answer)))
        at_s += rng.expovariate(options.rate)
    return arrivals


def run_evenness(options: EvennessOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError` when a fleet does not come up."""
    options.check()
    say, began = lines_on(console), time.monotonic()
    rounds: list[Round] = []
    requests = 0
    for number in range(options.rounds):
        rounds.append(Round(ORDER[number % len(ORDER)]))
        words = options.words(rounds[-1].policy)
        load = replace(options, seed=options.seed + number // len(SIDES))
        arrivals = skewed_load(load)
        requests += len(arrivals)
        fleet = FleetOptions(options.model, options.engines, serve_args=words)
        with FleetProcess(fleet, say) as process:
            asyncio.run(_measure(process, load, arrivals, rounds[-1]))
        spread = spread_over_time(rounds[-1].counts, _median(rounds[-1].prefill_s), options)
        say(
            f"round {number + 1}/{options.rounds} {' '.join(words)}: std of utilisation "
            f"{spread[0]:.3f}, mean {spread[1]:.2f}, {rounds[-1].tokens_per_s:.1f} tokens/s"
        )
        if broken := rounds[-1].broken:
            say(f"{len(broken)} streams broke in it, the first by {broken[0]}")
    return {
        **compared(rounds, options),
        "requests_per_round": round(requests / len(rounds), 1),
        "rate": options.rate,
        "offload": options.offload,
        "long_share": options.long_share,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _measure(
    fleet: FleetProcess, options: EvennessOptions, arrivals: list[Arrival], seen: Round
) -> None:
    async with StreamClient(fleet.base_url, SERVED_NAME) as client:
        requests = await requests_of(client, arrivals, options.seed)
        begin_ns = time.monotonic_ns()

        def take(at_ns: int, status: dict[str, Any]) -> None:
            seen.counts.append(counts_of((at_ns - begin_ns) / 1e9, status))

        async with watched(client, LOOK_EVERY_S, take):
            records = await play(client, arrivals, requests)
        status = await client.status()
    seen.broken = [record.fault for record in records if record.broken]
    pairs = zip(arrivals, records, strict=True)
    seen.records = [record for arrival, record in pairs if arrival.at_s >= WARM_UP_S]
    seen.prefill_s = [row["step_model_s"][1] for row in status["engines"]]
    seen.moves = status["recent_moves"]
    window_ns = range(begin_ns + int(WARM_UP_S * 1e9), begin_ns + int(_end_s(options) * 1e9))
    tokens = sum(at in window_ns for record in records for at in record.arrivals_ns)
    seen.tokens_per_s = tokens / options.seconds


def counts_of(at_s: float, status: dict[str, Any]) -> Counts:
    """What `/zerolayer/status` says of the engines' load."""
    demand = [row["demand"] for row in status["engines"]]
    return Counts(
        at_s,
        tuple(row["placed_tokens"] for row in demand),
        tuple(row["waiting_tokens"] for row in demand),
        tuple(row["decoding"] for row in demand),
        tuple(row["places"] for row in demand),
    )


def utilisation(
    counts: Sequence[Counts], prefill_s_per_token: float, window_s: float = WINDOWS_S[0]
) -> Floats:
    """Utilisation in each window of `window_s`, shape (windows, engines); see the module.

    Counts at the edge of two windows end one and begin the next. The last, unfinished window is
    left out.
    """
    if not counts:
        return np.zeros((0, 0))
    at_s = np.array([count.at_s for count in counts])
    placed = np.array([count.placed_tokens for count in counts], dtype=np.float64)
    waiting = np.array([count.waiting_tokens for count in counts], dtype=np.float64)
    decoding = np.array([np.divide(count.decoding, count.places) for count in counts])
    windows = np.floor((at_s - at_s[0]) / window_s + 1e-9).astype(np.int64)
    _, first = np.unique(windows, return_index=True)
    rows = []
    for begin, end in itertools.pairwise(first):
        demand = waiting[begin] + placed[end] - placed[begin]
        prefill = demand * prefill_s_per_token / (at_s[end] - at_s[begin])
        rows.append(prefill + decoding[begin:end].mean(axis=0))
    return np.array(rows).reshape(-1, decoding.shape[1])


def spread_over_time(
    counts: Sequence[Counts],
    prefill_s_per_token: float,
    options: EvennessOptions,
    window_s: float = WINDOWS_S[0],
) -> tuple[float, float]:
    """(std over the engines, utilisation), means over the time that counts. Raises EngineError
    where the fleet said too little."""
    counted = [count for count in counts if WARM_UP_S <= count.at_s < _end_s(options)]
    util = utilisation(counted, prefill_s_per_token, window_s)
    if len(util) == 0:
        raise EngineError(f"the fleet's status came too seldom for windows of {window_s:.0f} s")
    return float(spread_of(util).mean()), float(util.mean())


def compared(rounds: Sequence[Round], options: EvennessOptions) -> dict[str, Any]:
    """Both sides, and the ratio of their mean spreads: below 1 our policy is more even."""
    prefill_s = _median([value for seen in rounds for value in seen.prefill_s])
    sides: dict[str, Any] = {}
    for policy in SIDES:
        mine = [seen for seen in rounds if seen.policy == policy]
        pairs, long = (
            [spread_over_time(seen.counts, prefill_s, options, window_s) for seen in mine]
            for window_s in WINDOWS_S
        )
        sides[policy] = {
            "utilisation_std": round(float(np.mean([spread for spread, _ in pairs])), 4),
            "utilisation_std_by_round": [round(spread, 4) for spread, _ in pairs],
            "utilisation_std_5s": round(float(np.mean([spread for spread, _ in long])), 4),
            "utilisation_std_5s_by_round": [round(spread, 4) for spread, _ in long],
            "utilisation": round(float(np.mean([mean for _, mean in pairs])), 4),
            **latencies([record for seen in mine for record in seen.records]),
            "broken": [fault for seen in mine for fault in seen.broken],
            "tokens_per_s": round(float(np.mean([seen.tokens_per_s for seen in mine])), 2),
            "moves_by_reason": dict(Counter(str(m["reason"]) for seen in mine for m in seen.moves)),
            "move_gap_ms": summary([m["gap_ms"] for seen in mine for m in seen.moves]),
        }
    return {
        "sides": sides,
        "utilisation_std_ratio": _ratio(sides, "utilisation_std"),
        "utilisation_std_5s_ratio": _ratio(sides, "utilisation_std_5s"),
        "prefill_s_per_token": round(prefill_s, 6),
    }


def latencies(records: Sequence[StreamRecord]) -> dict[str, Any]:
    """TTFT and the worst pause of each stream, in ms."""
    ttft = [record.ttft_ms for record in records if record.ttft_ms is not None]
    gaps = [worst_gap_ms(record.arrivals_ns) for record in records]
    return {"ttft_ms": summary(ttft), "worst_gap_ms": summary(gaps)}


def _ratio(sides: dict[str, Any], figure: str) -> float | None:
    ours, theirs = (sides[policy][figure] for policy in SIDES)
    return round(ours / theirs, 3) if theirs else None


def _end_s(options: EvennessOptions) -> float:
    return WARM_UP_S + options.seconds


def _median(values: Sequence[float]) -> float:
    return percentile(values, 0.5) or 0.0
