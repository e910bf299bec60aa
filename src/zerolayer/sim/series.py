"""The curves of a report, cut down from results to what a picture of a few hundred points shows.

A run of an hour leaves a hundred thousand numbers; the report of all cells keeps a few thousand of
each policy, so the results themselves can be dropped as soon as a cell is done.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zerolayer.core.fleet_state import Floats
from zerolayer.sim.results import RunResult
from zerolayer.sim.statistics import (
    MEASURES,
    Cell,
    PolicyFigures,
    cell_of,
    figures_of,
    mean_of_known,
    seconds_of,
    spread_of,
)

TAIL_POINTS = 160
TIME_BINS = 120
MOVES_SHOWN = 1500
"""Moves that a timeline shows; of more, every second, third, ... is left out."""


@dataclass(frozen=True, slots=True)
class PolicySeries:
    """The curves of one policy in one cell."""

    tails: dict[str, tuple[Floats, Floats]]
    """Per measure: seconds, and the share of requests that took at least so long, falling."""
    bins_s: Floats
    """Ends of the time bins, shape (TIME_BINS,) or fewer."""
    spread: Floats
    """Standard deviation of utilisation over the engines, mean over each bin and all seeds."""
    heat: Floats
    """Mean utilisation per bin in the first seed's run, shape (engines, bins); NaN: down."""
    moves: npt.NDArray[Any]
    """Of the first seed's run, thinned out to MOVES_SHOWN."""
    moves_total: int
    faults: npt.NDArray[Any]
    """Of the first seed's run."""


@dataclass(frozen=True, slots=True)
class CellReport:
    """All policies in one cell, in the order in which they were named."""

    cell: Cell
    figures: tuple[PolicyFigures, ...]
    series: tuple[PolicySeries, ...]
    requests_per_s: float
    """Mean rate of arrivals of the first run."""
    lasted_s: float
    """Simulated seconds from the first arrival to the last of the first run."""
    faults: dict[str, int]
    """How many of each kind happened to the engines of the first policy, in all its runs."""
    digest: str
    """Hash over the event logs of the first policy's first run."""


def cell_report(per_policy: Sequence[Sequence[RunResult]]) -> CellReport:
    """What stays of a cell. `per_policy`: the runs of each policy, one per seed."""
    first = min(per_policy[0], key=lambda run: run.key.seed)
    arrivals = first.requests["arrival_s"]
    lasted_s = max(1e-9, float(arrivals[-1] - arrivals[0])) if len(arrivals) else 1.0
    end_s = max(float(run.sample_s.max(initial=0.0)) for runs in per_policy for run in runs)
    kinds = np.concatenate([run.faults["kind"] for run in per_policy[0]])
    return CellReport(
        cell_of(first),
        tuple(figures_of(runs) for runs in per_policy),
        tuple(series_of(runs, end_s) for runs in per_policy),
        len(arrivals) / lasted_s,
        lasted_s,
        dict(sorted(Counter(str(kind) for kind in kinds).items())),
        first.log_digest,
    )


def series_of(results: Sequence[RunResult], end_s: float) -> PolicySeries:
    """The curves of one policy's runs, over 0 to `end_s`."""
    runs = sorted(results, key=lambda run: run.key.seed)
    first = runs[0]
    rows = np.concatenate([run.requests for run in runs])
    bins_s = _bins(end_s)
    spreads = [_binned(run.sample_s, spread_of(run.util)[:, None], bins_s)[0] for run in runs]
    stride = max(1, -(-len(first.moves) // MOVES_SHOWN))
    return PolicySeries(
        tails={measure: tail_of(seconds_of(rows, measure)) for measure in MEASURES},
        bins_s=bins_s,
        spread=mean_of_known(np.stack(spreads), axis=0),
        heat=_binned(first.sample_s, first.util, bins_s),
        moves=first.moves[::stride],
        moves_total=len(first.moves),
        faults=first.faults,
    )


def tail_of(values: Floats) -> tuple[Floats, Floats]:
    """Points of 1 - F: at ranks that are evenly apart on a logarithmic axis, infinite ones left
    out."""
    ordered = np.sort(values)[::-1]
    ranks = np.unique(np.geomspace(1, len(ordered), TAIL_POINTS).round().astype(np.int64))[::-1]
    seconds, share = ordered[ranks - 1], ranks / len(ordered)
    seen = np.isfinite(seconds)
    return seconds[seen], share[seen]


def _bins(end_s: float) -> Floats:
    bins: Floats = np.linspace(0.0, max(end_s, 1e-9), TIME_BINS + 1)[1:]
    return bins


def _binned(times_s: Floats, values: Floats, bins_s: Floats) -> Floats:
    """Mean of the finite values (T, columns) in each bin: (columns, bins), NaN without any."""
    place = np.minimum(np.searchsorted(bins_s, times_s), len(bins_s) - 1)
    known = np.isfinite(values)
    sums, counts = np.zeros((2, values.shape[1], len(bins_s)))
    for column in range(values.shape[1]):
        at = place[known[:, column]]
        weights = values[known[:, column], column]
        sums[column] = np.bincount(at, weights=weights, minlength=len(bins_s))
        counts[column] = np.bincount(at, minlength=len(bins_s))
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means
