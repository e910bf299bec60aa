"""Laws of the inflow forecast."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import HORIZON_S
from zerolayer.dispatch.inflow import HISTORY_S, Inflow

SECOND_NS = 1_000_000_000
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3 * SECOND_NS), st.integers(0, 20_000)), min_size=1, max_size=60
)


def steady(inflow: Inflow, seconds: int, per_s: int, tokens: int = 100, from_s: int = 0) -> int:
    """The same every second; returns the time at the end."""
    for second in range(from_s, from_s + seconds):
        for number in range(per_s):
            inflow.arrived(second * SECOND_NS + number * SECOND_NS // per_s, tokens)
        inflow.forecast((second + 1) * SECOND_NS)
    return (from_s + seconds) * SECOND_NS


@given(ARRIVALS, st.integers(0, 100 * SECOND_NS))
def test_no_forecast_is_negative_or_beyond_what_a_second_ever_brought(
    gaps: list[tuple[int, int]], silence_ns: int
) -> None:
    inflow, now_ns = Inflow(), 0
    for gap_ns, tokens in gaps:
        now_ns += gap_ns
        inflow.arrived(now_ns, tokens)
        expected = inflow.forecast(now_ns)
        assert (expected >= 0.0).all()
    expected = inflow.forecast(now_ns + silence_ns)
    assert (expected[:, 0] <= len(gaps)).all()
    assert (expected[:, 1] <= sum(tokens for _, tokens in gaps)).all()


@given(ARRIVALS)
def test_the_same_arrivals_give_the_same_forecast(gaps: list[tuple[int, int]]) -> None:
    forecasts = []
    for _ in range(2):
        inflow, now_ns = Inflow(), 0
        for gap_ns, tokens in gaps:
            now_ns += gap_ns
            inflow.arrived(now_ns, tokens)
            inflow.forecast(now_ns)
        forecasts.append(inflow.forecast(now_ns))
    assert np.array_equal(forecasts[0], forecasts[1])


def test_a_steady_inflow_is_forecast_as_it_is() -> None:
    inflow = Inflow()
    now_ns = steady(inflow, seconds=90, per_s=8)
    assert inflow.forecast(now_ns) == pytest.approx(np.tile((8.0, 800.0), (HORIZON_S, 1)))


def test_history_is_in_whole_seconds_and_ends_at_the_last_full_quarter() -> None:
    inflow = Inflow()
    now_ns = steady(inflow, seconds=3, per_s=4)
    inflow.arrived(now_ns + SECOND_NS // 8, 1)  # in a quarter that is not over
    assert inflow.per_second(now_ns + SECOND_NS // 5).tolist() == [[4.0, 400.0]] * 3
    assert len(inflow.per_second(now_ns + 1_000 * SECOND_NS)) == HISTORY_S


def test_after_a_minute_without_traffic_nothing_is_expected() -> None:
    inflow = Inflow()
    now_ns = steady(inflow, seconds=30, per_s=20)
    assert not inflow.forecast(now_ns + (HISTORY_S + 1) * SECOND_NS).any()


def test_a_change_of_level_is_followed_within_seconds() -> None:
    """What the last seconds say weighs more where levels change than where they stay."""
    inflow = Inflow()
    now_ns = 0
    for level in (40, 4) * 8:
        now_ns = steady(inflow, seconds=12, per_s=level, from_s=now_ns // SECOND_NS)
    now_ns = steady(inflow, seconds=4, per_s=40, from_s=now_ns // SECOND_NS)
    assert inflow.forecast(now_ns)[0, 0] > 30.0


def test_prompts_are_kept_in_the_order_of_their_coming() -> None:
    inflow = Inflow()
    for tokens in range(1_000):
        inflow.arrived(tokens, tokens)
    assert list(inflow.prompts) == list(range(1_000 - len(inflow.prompts), 1_000))
