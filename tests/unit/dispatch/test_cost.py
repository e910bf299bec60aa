import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.limits import STEP_SECONDS_MAX
from zerolayer.dispatch.cost import (
    STEP_SECONDS_MIN,
    StepCostModel,
    StepWork,
)

WORKS = st.builds(
    StepWork,
    prefill_tokens=st.integers(0, 8_192),
    decode_requests=st.integers(0, 256),
    context_tokens=st.integers(0, 500_000),
)
SECONDS = st.floats(allow_nan=True, allow_infinity=True)


def expected(model: StepCostModel, work: StepWork) -> float:
    return model.expected_s(work.prefill_tokens, work.decode_requests, work.context_tokens)


def taught(base_s: float, per_token_s: float, steps: int, seed: int = 1) -> StepCostModel:
    """A model that saw a mix of decode steps and, every tenth, a prefill."""
    rng, model = random.Random(seed), StepCostModel()
    for number in range(steps):
        prefill = rng.randrange(20, 2_000) if number % 10 == 9 else 0
        work = StepWork(prefill, rng.randrange(1, 16), rng.randrange(100, 5_000))
        seconds = base_s + per_token_s * prefill
        model.observe(work, seconds * rng.lognormvariate(0.0, 0.1))
    return model


@given(st.lists(st.tuples(WORKS, SECONDS), max_size=40), WORKS)
def test_predictions_stay_in_bounds_whatever_was_observed(
    seen: list[tuple[StepWork, float]], work: StepWork
) -> None:
    model = StepCostModel()
    for observed, seconds in seen:
        model.observe(observed, seconds)
        assert STEP_SECONDS_MIN <= expected(model, work) <= STEP_SECONDS_MAX
    assert model.times.prefill_s >= 0
    assert model.times.decode_s >= 0


@given(st.lists(st.tuples(WORKS, st.floats(0, 10)), max_size=30), WORKS, st.integers(1, 4_000))
def test_more_work_never_costs_less(
    seen: list[tuple[StepWork, float]], work: StepWork, more: int
) -> None:
    model = StepCostModel()
    for observed, seconds in seen:
        model.observe(observed, seconds)
    heavier = StepWork(work.prefill_tokens + more, work.decode_requests, work.context_tokens)
    assert expected(model, heavier) >= expected(model, work)


def test_the_prior_fits_a_small_model_on_two_cores() -> None:
    model = StepCostModel()
    assert 0.04 <= model.expected_s(0, 1, 100) <= 0.07
    assert 0.04 <= model.expected_s(0, 16, 4_000) <= 0.07
    assert 2.0 <= model.expected_s(2_000, 0, 0) <= 4.0


@pytest.mark.parametrize(("base_s", "per_token_s"), [(0.005, 2e-5), (0.06, 1.2e-3), (0.4, 1e-2)])
def test_another_machine_is_learned_within_tens_of_steps(base_s: float, per_token_s: float) -> None:
    model = taught(base_s, per_token_s, steps=40)
    assert model.expected_s(0, 8, 2_000) == pytest.approx(base_s, rel=0.3)
    prefill_s = base_s + 1_500 * per_token_s
    assert model.expected_s(1_500, 8, 2_000) == pytest.approx(prefill_s, rel=0.35)


def test_an_engine_that_turns_twenty_times_slower_still_looks_slow_after_ten_steps() -> None:
    model, work = taught(0.05, 1.5e-3, steps=200), StepWork(0, 8, 2_000)
    for _ in range(10):
        model.observe(work, 1.0)
    assert expected(model, work) < 0.1


def test_a_box_that_stays_twice_as_slow_is_followed() -> None:
    model, work = taught(0.05, 1.5e-3, steps=200), StepWork(0, 8, 2_000)
    for _ in range(150):
        model.observe(work, 0.1)
    assert expected(model, work) == pytest.approx(0.1, rel=0.15)


def test_ten_thousand_decode_steps_do_not_spoil_what_was_known_of_prefills() -> None:
    model, rng = taught(0.05, 1.5e-3, steps=200), random.Random(2)
    before = model.expected_s(2_000, 4, 1_000)
    for number in range(10_000):
        work = StepWork(0, 4, 400 + 4 * (number % 1_000))
        model.observe(work, 0.05 * rng.lognormvariate(0.0, 0.15))
    assert model.expected_s(2_000, 4, 1_000) == pytest.approx(before, rel=0.2)
    assert model.expected_s(0, 4, 1_000) == pytest.approx(0.05, rel=0.2)


def test_error_percentiles_are_ordered_and_small_once_learned() -> None:
    assert StepCostModel().error_percentiles().steps == 0
    errors = taught(0.05, 1.5e-3, steps=600).error_percentiles()
    assert errors.steps == 256
    assert errors.p50 <= errors.p90 <= errors.p99
    assert errors.p50 < 0.15
