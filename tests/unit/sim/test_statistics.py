import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sim.synthetic import synthetic_run
from zerolayer.sim.results import Ending, RunResult
from zerolayer.sim.statistics import (
    Estimate,
    Resampling,
    Standing,
    figures_of,
    is_thin,
    quantile_of,
    ratio_of,
    seconds_of,
    spread_of,
    standings,
)


def run_of(e2e_s: list[float], seed: int = 0) -> RunResult:
    run = synthetic_run(seed=seed, requests=len(e2e_s))
    run.requests["ttft_s"], run.requests["worst_gap_s"] = 0.1, 0.2
    run.requests["e2e_s"] = e2e_s
    return run


def test_quantiles_are_nearest_ranks_over_all_seeds_together() -> None:
    figures = figures_of([run_of([1.0, 2.0, 3.0, 4.0]), run_of([5.0, 6.0, 7.0, 8.0], seed=1)])
    assert figures.quantile("e2e_s", 0.5).value == 4.0
    assert figures.quantile("e2e_s", 0.9).value == 8.0
    assert (figures.runs, figures.requests) == (2, 8)


def test_a_lost_request_is_infinitely_late_in_every_measure() -> None:
    run = run_of([1.0] * 99 + [math.nan])
    run.requests["ending"][99] = Ending.LOST
    figures = figures_of([run])
    for measure in ("ttft_s", "worst_gap_s", "e2e_s"):
        assert figures.quantile(measure, 0.9999).value == math.inf
        assert math.isfinite(figures.quantile(measure, 0.99).value)
    assert figures.lost_share.value == 0.01
    assert figures.slow_share.value == 0.01


def test_slow_counts_waits_and_slow_e2e_counts_the_whole_answer() -> None:
    run = run_of([6.0, 1.0, 1.0, 9.0])
    run.requests["worst_gap_s"][1] = 5.5
    figures = figures_of([run])
    assert figures.slow_share.value == 0.25
    assert figures.slow_e2e_share.value == 0.5


def test_broken_streams_are_counted_and_keep_their_times() -> None:
    run = run_of([1.0, 2.0, 3.0, 40.0])
    run.requests["ending"][3] = Ending.BROKEN
    figures = figures_of([run])
    assert figures.broken_share.value == 0.25
    assert figures.quantile("e2e_s", 0.99).value == 40.0


def test_spread_is_the_deviation_over_the_engines_that_are_up() -> None:
    util = np.array([[0.2, 0.6, np.nan], [0.5, 0.5, 0.5]])
    assert spread_of(util) == pytest.approx([0.2, 0.0])


def test_evenness_is_over_the_time_in_which_requests_arrive() -> None:
    run = synthetic_run()
    emptying = run.sample_s > run.requests["arrival_s"].max() / 2
    run.requests["arrival_s"] /= 2
    before = figures_of([run]).evenness
    run.util[emptying] = 0.0
    assert figures_of([run]).evenness == before


def test_equal_results_have_equal_intervals() -> None:
    runs = [synthetic_run(seed=seed) for seed in range(3)]
    assert figures_of(runs) == figures_of(list(reversed(runs)))


def test_intervals_hold_their_figure_and_narrow_with_more_requests() -> None:
    def width(requests: int) -> float:
        runs = [synthetic_run(seed=seed, requests=requests) for seed in range(5)]
        estimate = figures_of(runs).quantile("e2e_s", 0.99)
        assert estimate.low <= estimate.value <= estimate.high
        return estimate.high - estimate.low

    assert 0.0 < width(20_000) < width(500)


def test_a_quantile_with_fewer_than_five_requests_beyond_it_is_marked() -> None:
    assert not is_thin(5_000, 0.999)
    assert is_thin(4_999, 0.999)
    thin = [e.thin for e in figures_of([run_of([1.0] * 600)]).quantiles["e2e_s"]]
    assert thin == [False, False, False, True, True]


def test_few_seeds_are_also_drawn_within_and_one_seed_still_has_an_interval() -> None:
    values = np.arange(1000.0)
    one = Resampling([1000]).mean(values)
    many = Resampling([100] * 10).mean(np.tile(np.arange(100.0), 10))
    assert one.low < one.value < one.high
    assert many.low == many.value == many.high  # equal runs, and nothing is drawn within


def test_within_the_interval_of_the_best_means_not_above_its_upper_end() -> None:
    best, close, far = Estimate(1.0, 0.8, 1.5), Estimate(1.5, 1.0, 3.0), Estimate(1.6, 0.9, 2.0)
    assert standings([far, best, close]) == [Standing.BEHIND, Standing.BEST, Standing.WITHIN]


def test_a_ratio_to_a_run_that_is_half_as_fast_everywhere_is_a_half_without_doubt() -> None:
    fast, slow = synthetic_run("a_policy"), synthetic_run("b_policy")
    slow.requests["e2e_s"] = 2.0 * fast.requests["e2e_s"]
    ratio = ratio_of(figures_of([fast]), figures_of([slow]), "e2e_s", 0.99)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_of_two_that_never_end_is_one() -> None:
    lost = figures_of([synthetic_run(requests=20, lost=20)])
    assert ratio_of(lost, lost, "e2e_s", 0.5).value == 1.0


@given(
    st.lists(st.floats(0, 100) | st.just(math.inf), min_size=1, max_size=60),
    st.sampled_from((0.5, 0.9, 0.99)),
)
def test_a_quantile_is_one_of_the_values_and_the_share_does_not_exceed_it(
    values: list[float], share: float
) -> None:
    found = quantile_of(np.array(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


def test_seconds_leave_the_rows_as_they_were() -> None:
    run = synthetic_run(lost=3)
    before = run.requests.copy()
    seconds_of(run.requests, "e2e_s")
    assert (np.isnan(run.requests["e2e_s"]) == np.isnan(before["e2e_s"])).all()
    assert dataclasses.asdict(run.key)["policy"] == "zerolayer"
