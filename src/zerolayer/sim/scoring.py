"""Scores weights by running them: our tails in each cell against the best of some peers."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.parallel import RunTask, Simulators
from zerolayer.sim.plan import Plan
from zerolayer.sim.results import RunResult
from zerolayer.sim.statistics import Cell, quantile_of, seconds_of
from zerolayer.sim.tune import TERMS, Scores, is_far_behind, mean
from zerolayer.sim.verdict import OURS

PEERS = ("least_requests", "smg_least_load", "dynamo_kv", "llmd_scorers", "expected_wait")
"""What weights are measured against: one of each family that does well."""
SECONDS_MAX = 1e4
"""A quantile that a lost request makes infinite counts as this many seconds, so that its logarithm
is a number."""
SECONDS_MIN = 1e-4
BEHIND = 2.0
"""How much more it counts to be behind than to be ahead: the aim is to be behind nowhere."""

Tails = dict[tuple[str, float], float]
"""Seconds of each of TERMS."""
Watch = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The best peer of each cell, term by term."""

    tails: Mapping[Cell, Tails]
    names: Mapping[Cell, Mapping[tuple[str, float], str]]
    """Which peer that is."""


class Scoring:
    """Runs our policy with given weights over all cells of a plan."""

    def __init__(self, plan: Plan, simulators: Simulators, watch: Watch) -> None:
        self._plan = plan
        self._simulators = simulators
        self._watch = watch

    def baseline(self, peers: Sequence[str] = PEERS) -> Baseline:
        """Run the peers. Raises ConfigError and SimulationError as runs do."""
        by_peer = {peer: self._tails(peer, None, self._plan.traces) for peer in peers}
        tails: dict[Cell, Tails] = {}
        names: dict[Cell, dict[tuple[str, float], str]] = {}
        for cell in self._plan.cells():
            best = {
                term: min(peers, key=lambda peer, c=cell, t=term: by_peer[peer][c][t])  # type: ignore[misc]
                for term in TERMS
            }
            names[cell] = best
            tails[cell] = {term: by_peer[peer][cell][term] for term, peer in best.items()}
        return Baseline(tails, names)

    def scores(self, weights: Weights, baseline: Baseline, best: Scores | None = None) -> Scores:
        """Per trace, the mean of `lag` over its cells and TERMS. Traces are left out once the
        weights are far behind `best`."""
        found: dict[str, float] = {}
        for trace in self._plan.traces:
            tails = self._tails(OURS, weights, (trace,))
            found[trace] = mean(
                lag(tails[cell][term], baseline.tails[cell][term])
                for cell in tails
                for term in TERMS
            )
            if is_far_behind(found, best):
                break
        return found

    def _tails(
        self, policy: str, weights: Weights | None, traces: tuple[str, ...]
    ) -> dict[Cell, Tails]:
        plan = replace(self._plan, policies=(policy,), weights=weights, traces=traces)
        tasks: list[RunTask] = []
        cells: list[Cell] = []
        for cell in plan.cells():
            (runs,) = plan.tasks(cell)
            tasks += runs
            cells += [cell] * len(runs)
        results: dict[Cell, list[RunResult]] = defaultdict(list)
        for number, result in self._simulators.work(tasks, self._watch):
            results[cells[number]].append(result)
        return {cell: tails_of(results[cell]) for cell in plan.cells()}


def lag(ours: float, best_peer: float) -> float:
    """log(ours / best peer), times BEHIND where that is above 0."""
    ratio = math.log(ours / best_peer)
    return BEHIND * ratio if ratio > 0.0 else ratio


def tails_of(runs: Sequence[RunResult]) -> Tails:
    """Quantiles over the requests of all runs together."""
    rows = np.concatenate([run.requests for run in runs])
    return {
        (measure, share): min(
            SECONDS_MAX, max(SECONDS_MIN, quantile_of(seconds_of(rows, measure), share))
        )
        for measure, share in TERMS
    }
