"""What the runs of one policy say: quantiles of latency, shares, evenness, each with an interval.

A lost request counts as infinitely late in every measure: whoever waits for it waits for ever.

Intervals are 95 % percentile intervals of a block bootstrap (Davison and Hinkley, "Bootstrap
Methods and their Application", 1997: chapter 8.2.3 for blocks, 3.8 for the two levels). Seeds are
drawn with replacement; where there are few of them, blocks of neighbouring requests are drawn
within each as well, since five seeds alone are too few to draw from. Blocks and not single
requests, because one fault or burst makes many neighbours late together.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from zerolayer.core.fleet_state import Bools, Floats, Ints
from zerolayer.sim.results import Ending, RunResult

MEASURES = ("ttft_s", "worst_gap_s", "e2e_s")
"""The columns of REQUEST_ROW that quantiles are taken of."""
QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999)
SLOW_S = 5.0
"""From so many seconds on a wait counts as one that a person notices (the source's limit)."""
BEYOND_MIN = 5.0
"""A quantile with fewer requests than this beyond it rests on too little: it is `thin`."""
REPLICATES = 400
"""Bootstrap draws. The ends of a 95 % interval then rest on ten draws each."""
BLOCKS_PER_RUN = 50
RANKS_PER_DEVIATION = 8
"""How finely draws are told apart: ranks per standard deviation of a quantile's rank."""
SEEDS_FEW = 10
"""With fewer seeds than this, blocks within each seed are drawn too."""
_BOOTSTRAP_SEED = 20_261_130
_TAIL = 0.025
SECONDS_TINY = 1e-6
"""What a time of zero counts as where it divides."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float
    thin: bool = False
    """Fewer than BEYOND_MIN requests lie beyond it."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What policies are compared under."""

    trace: str
    utilisation: float
    faults: str
    engines: int


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """All runs of one policy in one cell."""

    policy: str
    continuation: str
    runs: int
    requests: int
    """Of all runs together."""
    quantiles: dict[str, tuple[Estimate, ...]]
    """Per measure, one estimate (in seconds) per QUANTILES."""
    slow_share: Estimate
    """Share of requests whose first token, or a later one, kept the client waiting over SLOW_S."""
    slow_e2e_share: Estimate
    """Share of requests that took more than SLOW_S from arrival to the last token."""
    broken_share: Estimate
    """Share of requests whose stream broke and was asked for again."""
    lost_share: Estimate
    evenness: Estimate
    """Mean over time of the standard deviation of utilisation over the engines; 0 is even. Over
    the time in which requests arrive: while a fleet empties, all policies become even."""
    moves_per_run: float
    """Streams that changed their engine unseen, on average over the runs."""
    draws: dict[str, Floats] = field(compare=False, repr=False)
    """Per measure, every bootstrap draw of its quantiles, shape (REPLICATES, QUANTILES)."""

    def quantile(self, measure: str, share: float) -> Estimate:
        """The estimate of one measure at one of QUANTILES."""
        return self.quantiles[measure][QUANTILES.index(share)]


def ratio_of(ours: PolicyFigures, other: PolicyFigures, measure: str, share: float) -> Estimate:
    """Our quantile over another policy's, with the interval of the paired draws: both met the same
    requests and faults, so what moves both together falls out. NaN becomes 1 (both infinite)."""
    at = QUANTILES.index(share)
    mine, theirs = ours.quantile(measure, share), other.quantile(measure, share)
    above = np.append(ours.draws[measure][:, at], mine.value)
    below = np.maximum(np.append(other.draws[measure][:, at], theirs.value), SECONDS_TINY)
    with np.errstate(invalid="ignore"):
        ratios = np.nan_to_num(above / below, nan=1.0, posinf=np.inf)
    low, high = np.quantile(ratios[:-1], (_TAIL, 1.0 - _TAIL), method="nearest")
    return Estimate(float(ratios[-1]), float(low), float(high), mine.thin)


class Standing(Enum):
    """Where an estimate stands among those of its peers; smaller is better."""

    BEST = "best"
    WITHIN = "within"
    """Not larger than the upper end of the best one's interval."""
    BEHIND = "behind"


def cell_of(result: RunResult) -> Cell:
    """The cell that a run belongs to."""
    key = result.key
    return Cell(key.trace, key.utilisation, key.faults, key.engines)


def figures_of(results: Sequence[RunResult], replicates: int = REPLICATES) -> PolicyFigures:
    """The figures of one policy in one cell; `results` are its runs, one per seed.

    Equal results give equal figures: the draws come from a fixed seed, the same one for every
    policy, so that policies over equal traces are drawn in step.
    """
    runs = sorted(results, key=lambda run: run.key.seed)
    rows = np.concatenate([run.requests for run in runs])
    drawn = Resampling([len(run.requests) for run in runs], replicates)
    late = {measure: seconds_of(rows, measure) for measure in MEASURES}
    tails = {measure: drawn.quantiles(values, QUANTILES) for measure, values in late.items()}
    waits: Bools = np.maximum(late["ttft_s"], late["worst_gap_s"]) > SLOW_S
    spreads = [_spread_under_load(run) for run in runs]
    return PolicyFigures(
        policy=runs[0].key.policy,
        continuation=runs[0].key.continuation,
        runs=len(runs),
        requests=len(rows),
        quantiles={measure: estimates for measure, (estimates, _) in tails.items()},
        slow_share=drawn.mean(waits),
        slow_e2e_share=drawn.mean(late["e2e_s"] > SLOW_S),
        broken_share=drawn.mean(rows["ending"] == Ending.BROKEN),
        lost_share=drawn.mean(rows["ending"] == Ending.LOST),
        evenness=Resampling([len(s) for s in spreads], replicates).mean(np.concatenate(spreads)),
        moves_per_run=sum(len(run.moves) for run in runs) / len(runs),
        draws={measure: draws for measure, (_, draws) in tails.items()},
    )


def seconds_of(rows: npt.NDArray[Any], measure: str) -> Floats:
    """One measure of each request, in seconds; infinite for lost requests and where none came."""
    values: Floats = rows[measure].astype(np.float64)
    values[(rows["ending"] == Ending.LOST) | np.isnan(values)] = np.inf
    return values


def spread_of(util: Floats) -> Floats:
    """Standard deviation over the engines at each sample, shape (T,); NaN marks an engine that is
    down, and such engines are left out."""
    deviation = util - mean_of_known(util, axis=1)[:, None]
    spread: Floats = np.nan_to_num(np.sqrt(mean_of_known(deviation**2, axis=1)))
    return spread


def _spread_under_load(run: RunResult) -> Floats:
    arriving = run.sample_s <= run.requests["arrival_s"].max(initial=0.0)
    return spread_of(run.util[arriving] if arriving.any() else run.util)


def mean_of_known(values: Floats, axis: int) -> Floats:
    """Mean of those values that are numbers; NaN where there is none."""
    known = np.isfinite(values)
    counts = known.sum(axis=axis)
    sums = np.where(known, values, 0.0).sum(axis=axis)
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def quantile_of(values: Floats, share: float) -> float:
    """Nearest rank: the smallest value that at least `share` (0..1] of all do not exceed."""
    rank = max(0, int(np.ceil(share * len(values) - 1e-9)) - 1)
    return float(np.partition(values, rank)[rank])


def standings(estimates: Sequence[Estimate]) -> list[Standing]:
    """How each stands among all; smaller is better, equals share a place."""
    best = min(estimates, key=lambda estimate: (estimate.value, -estimate.high))

    def standing(estimate: Estimate) -> Standing:
        if estimate.value == best.value:
            return Standing.BEST
        return Standing.WITHIN if estimate.value <= best.high else Standing.BEHIND

    return [standing(estimate) for estimate in estimates]


class Resampling:
    """Bootstrap draws over rows that belong to runs, as how often each block of rows is drawn."""

    def __init__(self, rows_per_run: Sequence[int], replicates: int = REPLICATES) -> None:
        """`rows_per_run`: rows of each run, in the order in which they are concatenated."""
        rng = np.random.default_rng(_BOOTSTRAP_SEED)
        blocks = [max(1, min(BLOCKS_PER_RUN, rows)) for rows in rows_per_run]
        firsts = [0, *itertools.accumulate(blocks)]
        self._block: Ints = np.concatenate(
            [
                first + np.arange(rows) * count // max(1, rows)
                for rows, count, first in zip(rows_per_run, blocks, firsts, strict=False)
            ]
        )
        seeds = len(blocks)
        drawn = rng.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=replicates)
        within = [
            self._within(drawn[:, seed], blocks[seed], rng, few=seeds < SEEDS_FEW)
            for seed in range(seeds)
        ]
        self._draws: Ints = np.concatenate(within, axis=1)

    @staticmethod
    def _within(times: Ints, blocks: int, rng: np.random.Generator, *, few: bool) -> Ints:
        """How often each block of one run is drawn, shape (replicates, blocks)."""
        if not few:
            return np.repeat(times[:, None], blocks, axis=1)
        drawn: Ints = rng.multinomial(times * blocks, np.full(blocks, 1.0 / blocks))
        return drawn

    def mean(self, values: npt.NDArray[Any]) -> Estimate:
        """The mean of finite values or truths, one per row."""
        count = self._draws.shape[1]
        sums = np.bincount(self._block, weights=values.astype(np.float64), minlength=count)
        sizes = np.bincount(self._block, minlength=count)
        means = (self._draws @ sums) / np.maximum(1, self._draws @ sizes)
        return self._estimate(float(values.mean()), means)

    def quantiles(
        self, values: Floats, shares: Sequence[float]
    ) -> tuple[tuple[Estimate, ...], Floats]:
        """Nearest-rank quantiles of values, one per row, which may be infinite; and every draw of
        them, shape (replicates, shares)."""
        drawn = self._drawn(values, shares)
        estimates = tuple(
            self._estimate(
                quantile_of(values, share), drawn[:, at], thin=is_thin(len(values), share)
            )
            for at, share in enumerate(shares)
        )
        return estimates, drawn

    def _drawn(self, values: Floats, shares: Sequence[float]) -> Floats:
        """A draw's quantile is rounded up to one of the ranks of `_ranks`."""
        order = np.argsort(values, kind="stable")
        ordered, ranks = values[order], _ranks(len(values))
        cell = self._block[order] * len(ranks) + np.searchsorted(ranks, np.arange(len(values)))
        blocks = self._draws.shape[1]
        counts = np.bincount(cell, minlength=blocks * len(ranks)).reshape(blocks, len(ranks))
        weights = self._draws.astype(np.float64) @ counts.cumsum(axis=1).astype(np.float64)
        totals = weights[:, -1:] * (1.0 - 1e-9)
        places = [(weights >= share * totals).argmax(axis=1) for share in shares]
        drawn: Floats = ordered[ranks[np.stack(places, axis=1)]]
        return drawn

    @staticmethod
    def _estimate(value: float, replicates: Floats, *, thin: bool = False) -> Estimate:
        low, high = np.quantile(replicates, (_TAIL, 1.0 - _TAIL), method="nearest")
        return Estimate(value, float(low), float(high), thin)


def _ranks(count: int) -> Ints:
    """Ranks that a bootstrap looks at, ascending from 0 to count - 1.

    The d-th rank from the top moves by about sqrt(d) from draw to draw, so they lie that far apart
    divided by RANKS_PER_DEVIATION: d = (k / (2 * RANKS_PER_DEVIATION))^2.
    """
    steps = np.arange(2 * RANKS_PER_DEVIATION * np.sqrt(count) + 1)
    below = np.minimum((steps / (2 * RANKS_PER_DEVIATION)) ** 2, count - 1)
    ranks: Ints = np.unique(count - 1 - below.round().astype(np.int64))
    return ranks


def is_thin(requests: int, share: float) -> bool:
    """Whether too few requests lie beyond this quantile to rely on it."""
    return requests * (1.0 - share) < BEYOND_MIN - 1e-6
