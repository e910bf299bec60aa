"""Laws of the factors that mend a forecast's level."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import HORIZON_S, Floats
from zerolayer.dispatch.calibration import FACTOR_MAX, Calibration, FleetLoad

SECOND_NS = 1_000_000_000


def followed(said: Floats, seconds: int, every_s: float = 1.0) -> Floats:
    """A fleet that gets 0.4 s of prefill a second and decodes at 0.2 of its places; the factors at
    the end."""
    calibration, factors = Calibration(), np.ones((2, HORIZON_S))
    for look in range(seconds):
        load = FleetLoad(backlog_s=0.1, came_s=0.4 * look * every_s, decoding=0.2, mem=0.5)
        factors = calibration.factors(int(look * every_s * SECOND_NS), load, said)
    return factors


def said_of(util: float, mem: float) -> Floats:
    return np.repeat(np.array([[util], [mem]]), HORIZON_S, axis=1)


def test_a_forecast_that_comes_true_is_left_alone() -> None:
    assert followed(said_of(0.7, 0.5), 300) == pytest.approx(np.ones((2, HORIZON_S)), abs=1e-6)


def test_a_forecast_that_is_always_too_low_is_raised_to_what_comes() -> None:
    factors = followed(said_of(0.5, 0.4), 300)
    assert factors[0] == pytest.approx(np.full(HORIZON_S, 1.4), rel=0.01)
    assert factors[1] == pytest.approx(np.full(HORIZON_S, 1.25), rel=0.01)


def test_each_horizon_has_its_own_factor() -> None:
    said = np.array([np.linspace(0.7, 0.35, HORIZON_S), np.full(HORIZON_S, 0.5)])
    factors = followed(said, 300)[0]
    assert factors[0] == pytest.approx(1.0, abs=0.01)
    assert (np.diff(factors) > 0.0).all()


def test_looks_that_come_too_late_teach_nothing() -> None:
    assert (followed(said_of(0.5, 0.4), 100, every_s=3.0) == 1.0).all()


def test_an_idle_fleet_teaches_nothing() -> None:
    calibration, factors = Calibration(), np.zeros((2, HORIZON_S))
    for second in range(100):
        load = FleetLoad(0.0, 0.0, 0.0, 0.0)
        factors = calibration.factors(second * SECOND_NS, load, np.zeros((2, HORIZON_S)))
    assert (factors == 1.0).all()


@given(st.lists(st.tuples(*[st.floats(0.0, 50.0)] * 5, st.integers(1, 3 * SECOND_NS)), max_size=40))
def test_factors_stay_within_bounds(
    looks: list[tuple[float, float, float, float, float, int]],
) -> None:
    calibration, now_ns, came_s = Calibration(), 0, 0.0
    for backlog_s, more_s, decoding, mem, said, later_ns in looks:
        now_ns, came_s = now_ns + later_ns, came_s + more_s
        load = FleetLoad(backlog_s, came_s, decoding, mem)
        factors = calibration.factors(now_ns, load, said_of(said, said))
        assert (factors >= 1.0 / FACTOR_MAX).all()
        assert (factors <= FACTOR_MAX).all()
