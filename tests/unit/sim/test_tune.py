import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.unit.sim.synthetic import synthetic_run
from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.parallel import Simulators
from zerolayer.sim.plan import Plan
from zerolayer.sim.scoring import SECONDS_MAX, Scoring, tails_of
from zerolayer.sim.tune import (
    FIXED,
    SOURCE_OBJECTIVE,
    TERMS,
    Candidate,
    Scores,
    cross_validate,
    grid_points,
    is_far_behind,
    search_weights,
    simplex,
    tunable,
)


def bowl(weights: Weights, _best: Scores | None = None) -> Scores:
    """Lowest at entropy 4, total 0.05 and the source's objective; trace b cares twice as much."""
    far = abs(math.log((weights.entropy + 1e-6) / 4))
    far += abs(math.log((weights.total + 1e-6) / 0.05))
    far += abs(weights.objective.util - SOURCE_OBJECTIVE.util)
    return {"a": far, "b": 2 * far}


def never(_share: float) -> bool:
    return False


def up_after(questions: int) -> Callable[[float], bool]:
    asked = iter(range(questions))
    return lambda _share: next(asked, None) is None


def test_the_search_finds_the_bottom_of_a_bowl() -> None:
    best = search_weights(bowl, never, points=30).best()
    assert best.weights.entropy == pytest.approx(4, rel=0.15)
    assert best.weights.total == pytest.approx(0.05, rel=0.15)
    assert best.weights.objective == SOURCE_OBJECTIVE


def test_the_same_seed_tries_the_same_candidates_in_the_same_order() -> None:
    first, second = (search_weights(bowl, never, points=10, seed=3).tried for _ in range(2))
    assert [c.weights for c in first] == [c.weights for c in second]


def test_no_candidate_is_evaluated_twice() -> None:
    evaluated = []

    def noted(weights: Weights, _best: Scores | None) -> Scores:
        evaluated.append(weights)
        return bowl(weights)

    search_weights(noted, never, points=20)
    assert len(evaluated) == len(set(evaluated))


def test_the_shipped_weights_come_first_and_alone_when_no_time_is_given() -> None:
    search = search_weights(bowl, up_after(0), points=20)
    assert [candidate.weights for candidate in search.tried] == [Weights()]
    assert search.cut_short


def test_the_winner_is_never_worse_than_the_shipped_weights() -> None:
    for questions in range(0, 60, 7):
        search = search_weights(bowl, up_after(questions), points=20)
        assert search.best().score <= search.tried[0].score


def test_grid_points_differ_and_leave_the_unit_alone() -> None:
    points = grid_points(40, Random(1))
    assert len(set(points)) == 40
    assert {(point.ttft, point.pack) for point in points} == {(Weights().ttft, Weights().pack)}
    assert not set(tunable(Weights())) & FIXED


def test_the_simplex_adds_up_to_one_and_begins_with_the_source() -> None:
    points = simplex()
    assert points[0] == SOURCE_OBJECTIVE
    assert len(set(points)) == len(points)
    assert all(p.util + p.mem + p.link == pytest.approx(1.0) for p in points)


def test_a_candidate_that_is_far_behind_on_the_first_trace_is_given_up_and_never_wins() -> None:
    def hasty(weights: Weights, best: Scores | None) -> Scores:
        first = {"a": bowl(weights)["a"]}
        return first if is_far_behind(first, best) else bowl(weights)

    search = search_weights(hasty, never, points=30)
    given_up = [candidate for candidate in search.tried if not candidate.complete]
    assert given_up
    assert all(candidate.score == math.inf for candidate in given_up)
    assert search.best().complete
    assert search.best().weights.entropy == pytest.approx(4, rel=0.2)


def test_cross_validation_chooses_without_the_trace_that_it_scores() -> None:
    good_on_a = Candidate(replace(Weights(), entropy=2.0), {"a": -1.0, "b": 5.0}, "grid")
    good_on_b = Candidate(replace(Weights(), entropy=3.0), {"a": 4.0, "b": -2.0}, "grid")
    later = Candidate(replace(Weights(), entropy=9.0), {"a": -9.0, "b": -9.0}, "local")
    default = Candidate(Weights(), {"a": 0.0, "b": 0.0}, "default")
    folds = cross_validate([default, good_on_a, good_on_b, later])
    assert [(fold.trace, fold.score, fold.default) for fold in folds] == [
        ("a", 4.0, 0.0),
        ("b", 5.0, 0.0),
    ]
    assert cross_validate([Candidate(Weights(), {"a": 0.0}, "default")]) == []


def test_a_lost_request_costs_much_but_finitely() -> None:
    tails = tails_of([synthetic_run(requests=100, lost=5)])
    assert set(tails) == set(TERMS)
    assert tails["e2e_s", 0.999] == SECONDS_MAX


def test_scores_compare_real_runs_with_the_best_peer_and_repeat() -> None:
    plan = Plan(("azure_2023_conv",), ("zerolayer",), faults=("none",), seeds=1, requests=60,
                engines=2)  # fmt: skip
    with Simulators(1) as simulators:
        scoring = Scoring(plan, simulators, lambda _done: None)
        baseline = scoring.baseline(("round_robin", "expected_wait"))
        scores = scoring.scores(Weights(), baseline)
        assert scores == scoring.scores(Weights(), baseline)
    assert list(scores) == ["azure_2023_conv"]
    assert abs(scores["azure_2023_conv"]) < 1.0
    (names,) = baseline.names.values()
    assert set(names.values()) <= {"round_robin", "expected_wait"}
    assert np.isfinite(list(next(iter(baseline.tails.values())).values())).all()
