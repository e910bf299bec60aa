"""Finds the weights of our policy: a coarse grid, then a local search, checked over traces.

What is made small: the mean over cells, and over TERMS within each, of

    log(our quantile / the lowest quantile of the peers in that cell)

with what is above 0 counted twice (`scoring.lag`): it matters more to be behind nowhere than to be
far ahead somewhere. 0 is as good as the best peer everywhere, and -0.1 is 10 % better. P99 stands
beside P99.9 because the P99.9 of a few thousand requests rests on a handful of them. Runs of all
candidates have the same seeds, so the same arrivals and faults, and differ by the weights alone.

Three stages:
1. Grid: points drawn evenly from the grid of LEVELS times each weight's default (random points of
   a grid cover single dimensions better than a full coarse grid of the same size: Bergstra and
   Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 2012).
2. Objective: w1, w2, w3 of the entropy on a grid over the simplex, the rest as found.
3. Local: one weight at a time up and down by a factor, which shrinks when nothing helps any more
   (Hooke and Jeeves, "Direct Search", JACM 1961).

Cross-validation is over the candidates of the grid, which owe nothing to any trace: for each
trace, the best candidate on the others is scored on it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from zerolayer.dispatch.entropy import EntropyWeights
from zerolayer.dispatch.policies.zerolayer import Weights

TERMS = (("e2e_s", 0.999), ("worst_gap_s", 0.999), ("e2e_s", 0.99), ("worst_gap_s", 0.99))
FIXED = frozenset({"ttft", "pack"})
"""`ttft` is the unit of all others: only ratios of weights matter. `pack` belongs to a preference
of clients and is meant to outweigh everything."""
LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Factors on a weight's default (on 1 where the default is 0)."""
SIMPLEX_STEPS = 5
"""w1, w2 and w3 are multiples of 1/SIMPLEX_STEPS that add up to 1."""
SOURCE_OBJECTIVE = EntropyWeights(0.6, 0.3, 0.1)
"""The weights that the source found by grid search."""
FACTOR_FIRST = 2.5
FACTOR_LAST = 1.15
"""The local search ends when a factor as small as this helps no more."""

Scores = Mapping[str, float]
"""Per trace, the mean over its cells; smaller is better."""
Evaluate = Callable[[Weights, Scores | None], Scores]
"""Scores of weights, given the best scores so far. It may give up a candidate that is far behind
after some traces; then the others are missing."""
GIVE_UP = 0.1
"""How far behind the best, over the traces so far, a candidate is not worth the other traces."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights, and what they got."""

    weights: Weights
    scores: Scores
    stage: str

    complete: bool = True
    """It was run on every trace."""

    @property
    def score(self) -> float:
        """Mean over traces; infinite for one that was given up."""
        return mean(self.scores.values()) if self.complete else math.inf


@dataclass(frozen=True, slots=True)
class Fold:
    """One trace left out."""

    trace: str
    weights: Weights
    """The best on the other traces."""
    score: float
    """What they get on this one."""
    default: float
    """What the shipped weights get on it."""


@dataclass(slots=True)
class Search:
    """Everything that a search tried, in its order."""

    evaluate: Evaluate
    time_is_up: Callable[[float], bool]
    """Asked before each candidate with the share of the time that this stage may have used."""
    tried: list[Candidate] = field(default_factory=list)
    seen: dict[Weights, Candidate] = field(default_factory=dict)
    cut_short: bool = False
    """Time was up before the search had ended by itself."""

    def attempt(self, weights: Weights, stage: str) -> Candidate:
        """Evaluate weights, once."""
        if weights not in self.seen:
            best = self.best().scores if self.tried else None
            scores = dict(self.evaluate(weights, best))
            complete = best is None or scores.keys() == best.keys()
            candidate = Candidate(weights, scores, stage, complete)
            self.seen[weights] = candidate
            self.tried.append(candidate)
        return self.seen[weights]

    def best(self) -> Candidate:
        """The one with the lowest score; of equals the one that came first."""
        return min(self.tried, key=lambda candidate: candidate.score)


GRID_TIME = 0.5
SIMPLEX_TIME = 0.7
"""Shares of the time after which a stage ends."""


def search_weights(
    evaluate: Evaluate, time_is_up: Callable[[float], bool], points: int, seed: int = 0
) -> Search:
    """All three stages. At least the default weights are evaluated."""
    search = Search(evaluate, time_is_up)
    search.attempt(Weights(), "default")
    for weights in grid_points(points, Random(seed)):
        if time_is_up(GRID_TIME):
            search.cut_short = True
            break
        search.attempt(weights, "grid")
    objective_grid(search)
    local_search(search)
    return search


def tunable(weights: Weights) -> list[str]:
    """Names of the weights that are searched."""
    numbers = [f.name for f in fields(weights) if isinstance(getattr(weights, f.name), float)]
    return [name for name in numbers if name not in FIXED]


def grid_points(points: int, rng: Random) -> list[Weights]:
    """Different points of the grid, drawn with equal chance."""
    default = Weights()
    names = tunable(default)
    drawn: dict[Weights, None] = {}
    for _ in range(points * 20):
        if len(drawn) == points:
            break
        values = {name: _base(default, name) * rng.choice(LEVELS) for name in names}
        drawn[_changed(default, values)] = None
    return list(drawn)


def _changed(weights: Weights, values: Mapping[str, Any]) -> Weights:
    return replace(weights, **values)


def _base(weights: Weights, name: str) -> float:
    value = float(getattr(weights, name))
    return value if value > 0.0 else 1.0


def simplex(steps: int = SIMPLEX_STEPS) -> list[EntropyWeights]:
    """The source's weights, and all that are multiples of 1/steps, without those that leave
    evenness of utilisation out altogether."""
    grid = [
        EntropyWeights(util / steps, mem / steps, (steps - util - mem) / steps)
        for util, mem in itertools.product(range(steps + 1), repeat=2)
        if util > 0 and util + mem <= steps
    ]
    return [SOURCE_OBJECTIVE, *(point for point in grid if point != SOURCE_OBJECTIVE)]


def objective_grid(search: Search) -> None:
    """Try w1, w2, w3 with the rest as it is best so far. Where the best weights give the entropy
    nothing, with its default weight, as nothing would change otherwise."""
    start = search.best().weights
    if start.entropy == 0.0:
        start = replace(start, entropy=Weights().entropy)
    for point in simplex():
        if search.time_is_up(SIMPLEX_TIME):
            search.cut_short = True
            return
        search.attempt(replace(start, objective=point), "objective")


def local_search(search: Search) -> None:
    """Up and down from the best, one weight after the other."""
    factor = FACTOR_FIRST
    while factor >= FACTOR_LAST:
        before = search.best()
        for name in tunable(before.weights):
            for weights in _neighbours(search.best().weights, name, factor):
                if search.time_is_up(1.0):
                    search.cut_short = True
                    return
                search.attempt(weights, "local")
        if search.best() is before:
            factor = math.sqrt(factor)


def _neighbours(weights: Weights, name: str, factor: float) -> Iterable[Weights]:
    value = float(getattr(weights, name))
    if value == 0.0:
        yield _changed(weights, {name: 0.1 * _base(Weights(), name)})
        return
    for changed in (value * factor, value / factor):
        yield _changed(weights, {name: float(f"{changed:.3g}")})


def cross_validate(tried: Sequence[Candidate]) -> list[Fold]:
    """Leave out one trace after the other. Empty with a single trace."""
    default = tried[0]
    fair = [c for c in tried if c.stage in ("default", "grid") and c.complete]
    folds = []
    for trace in default.scores:
        others = [name for name in default.scores if name != trace]
        if not others:
            continue
        best = min(fair, key=lambda candidate: mean(candidate.scores[name] for name in others))
        folds.append(Fold(trace, best.weights, best.scores[trace], default.scores[trace]))
    return folds


def is_far_behind(scores: Scores, best: Scores | None) -> bool:
    """Whether a candidate with these scores, of some traces, is given up."""
    if best is None:
        return False
    return mean(scores.values()) - mean(best[trace] for trace in scores) > GIVE_UP


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    listed = list(values)
    return math.fsum(listed) / len(listed)
