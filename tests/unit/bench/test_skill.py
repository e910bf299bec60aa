"""Skill of forecasts: known cases."""

import numpy as np
import pytest

from zerolayer.bench.forecast import fleet_traffic
from zerolayer.bench.skill import AVERAGE_S, Subject, measured_skill
from zerolayer.core.fleet_state import HORIZON_S, Floats
from zerolayer.sim.traces import Trace

SUBJECT = Subject("made_up", "recorded", "requests", 1.0, 1.0)


def noise(seconds: int = 4_000) -> Floats:
    return np.random.default_rng(7).poisson(5.0, (seconds, 1)).astype(np.float64)


def said_always(values: Floats) -> Floats:
    return np.repeat(values[:, None, :], HORIZON_S, axis=1)


def test_saying_the_last_second_again_has_no_skill_against_no_change() -> None:
    actual = noise()
    skill = measured_skill(SUBJECT, actual, said_always(actual))
    assert skill.no_change == (0.0,) * HORIZON_S
    assert not skill.holds


def test_knowing_what_comes_is_perfect() -> None:
    actual = noise()
    ahead = [np.roll(actual, -seconds, axis=0) for seconds in range(1, HORIZON_S + 1)]
    skill = measured_skill(SUBJECT, actual, np.stack(ahead, axis=1))
    assert skill.no_change == skill.best_average == (1.0,) * HORIZON_S


def test_on_independent_arrivals_the_mean_gains_what_theory_says() -> None:
    """No change errs with twice the variance: 1 - 1 / sqrt(2)."""
    actual = noise(20_000)
    skill = measured_skill(SUBJECT, actual, said_always(np.full_like(actual, 5.0)))
    assert skill.no_change_rms == pytest.approx((1.0 - 0.5**0.5,) * HORIZON_S, abs=0.02)
    expected = 1.0 - 1.0 / (1.0 + 1.0 / AVERAGE_S) ** 0.5
    assert skill.average == pytest.approx((expected,) * HORIZON_S, abs=0.02)


def test_an_engine_that_is_down_counts_neither_way() -> None:
    actual = np.hstack((noise(), np.full((4_000, 1), np.nan)))
    alone = measured_skill(SUBJECT, actual[:, :1], said_always(np.full((4_000, 1), 5.0)))
    both = measured_skill(SUBJECT, actual, said_always(np.full((4_000, 2), 5.0)))
    assert both.no_change == pytest.approx(alone.no_change)


def test_a_few_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        measured_skill(SUBJECT, noise(10), said_always(noise(10)))


def test_a_fleets_traffic_is_shifted_copies_at_the_asked_rate() -> None:
    arrival = np.sort(np.random.default_rng(3).uniform(0.0, 600.0, 1_200))
    ones = np.ones(1_200, dtype=np.int64)
    prefixes = tuple((number % 5,) for number in range(1_200))
    trace = Trace("made_up", arrival - arrival[0], 10 * ones, ones, prefixes, 512)
    traffic = fleet_traffic(trace, 20.0, 100)
    assert len(traffic) / traffic.duration_s == pytest.approx(20.0, rel=0.01)
    assert traffic.duration_s == pytest.approx(100.0, rel=0.1)
    assert (np.diff(traffic.arrival_s) >= 0.0).all()
    assert traffic.prefixes is not None
    assert len(set(traffic.prefixes)) == 10 * 5  # a copy's prefixes are its own
