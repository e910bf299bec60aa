import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.dispatch.cost import CostPrior, StepCostModel, StepTimes, StepWork
from zerolayer.dispatch.pooling import CostPool, FleetCosts

GPU = StepTimes(0.006, 2e-5, 3e-5, 4e-9, 0.0)
LONG = StepWork(2_000, 0, 0)


def learn(
    model: StepCostModel, truth: StepTimes, steps: int, rng: random.Random, noise: float = 0.3
) -> None:
    """Many decode steps, some with a short prompt in them, few with a long one."""
    for number in range(steps):
        prefill = rng.choice((0, 0, 0, 0, 40, 60)) if number % 40 else 1_500
        streams = rng.randint(4, 12)
        work = StepWork(prefill, streams, streams * rng.randint(300, 400))
        seconds = truth.expected_s(work.prefill_tokens, work.decode_requests, work.context_tokens)
        model.observe(work, seconds * max(0.3, rng.gauss(1.0, noise)))


def errors(times: list[StepTimes], truths: list[StepTimes]) -> float:
    """Mean error of what a prompt token costs, as a share."""
    pairs = zip(times, truths, strict=True)
    return float(np.mean([abs(got.prefill_s / true.prefill_s - 1.0) for got, true in pairs]))


def times_slower(factor: float) -> StepTimes:
    return StepTimes(*(factor * value for value in GPU))


def test_equal_engines_are_told_apart_less_than_by_their_own_steps_alone() -> None:
    rng = random.Random(1)
    models = [StepCostModel() for _ in range(8)]
    for model in models:
        learn(model, GPU, 200, rng)
    pool = CostPool(models)
    pooled = pool.times(models)
    alone = [model.times for model in models]
    assert errors(pooled, [GPU] * 8) < 0.5 * errors(alone, [GPU] * 8)
    assert np.std([t.prefill_s for t in pooled]) < 0.3 * np.std([t.prefill_s for t in alone])


def test_an_engine_that_is_slow_stays_slow_in_the_pool() -> None:
    rng = random.Random(2)
    truths = [GPU] * 7 + [times_slower(3.0)]
    models = [StepCostModel() for _ in truths]
    for model, truth in zip(models, truths, strict=True):
        learn(model, truth, 300, rng, noise=0.1)
    pool = CostPool(models)
    fast, slow = pool.times([models[0], models[7]])
    assert slow.expected_s(0, 8, 2_800) / fast.expected_s(0, 8, 2_800) == pytest.approx(
        3.0, rel=0.2
    )
    assert slow.expected_s(1_500, 8, 2_800) > 2.0 * fast.expected_s(1_500, 8, 2_800)


def test_an_engine_without_work_is_expected_to_be_like_the_others() -> None:
    rng, costs = random.Random(3), FleetCosts()
    costs.resize([StepCostModel(), StepCostModel()])
    learn(costs.models[0], GPU, 200, rng)
    idle = costs.models[1].times
    assert idle.prefill_s > 10 * GPU.prefill_s
    costs.refresh(np.array((0, 0)))
    assert costs.times[1].prefill_s == pytest.approx(costs.times[0].prefill_s, rel=0.1)
    assert costs.times[1].step_s == pytest.approx(costs.times[0].step_s, rel=0.1)
    costs.observe(1, LONG, 0.20)
    assert costs.times[1] != costs.models[1].times
    for _ in range(60):
        costs.observe(1, LONG, 0.20)
    costs.refresh(np.array((0, 0)))
    assert costs.times[1].expected_s(2_000, 0, 0) == pytest.approx(0.20, rel=0.2)


def test_other_kinds_of_engines_say_nothing() -> None:
    rng, costs = random.Random(4), FleetCosts()
    costs.resize([StepCostModel() for _ in range(3)])
    for engine, truth in enumerate((GPU, GPU, times_slower(10.0))):
        learn(costs.models[engine], truth, 200, rng)
    costs.refresh(np.array((0, 0, 1)))
    assert costs.times[2] == pytest.approx(costs.models[2].times)
    assert costs.times[0].prefill_s == pytest.approx(GPU.prefill_s, rel=0.5)


def test_nobody_has_learned_anything() -> None:
    costs = FleetCosts()
    costs.resize([StepCostModel(), StepCostModel()])
    costs.refresh(np.array((0, 0)))
    expected = StepTimes.of(np.array(CostPrior().mean()))
    for times in costs.times:
        assert times == pytest.approx(expected)


def test_a_fleet_that_grows_and_shrinks_keeps_what_it_knows() -> None:
    rng, costs = random.Random(5), FleetCosts()
    costs.resize([StepCostModel()])
    learn(costs.models[0], GPU, 100, rng)
    costs.refresh(np.array((0,)))
    known = costs.times[0]
    costs.resize([*costs.models, StepCostModel()])
    assert costs.times[0] == known
    costs.observe(1, LONG, 0.05)
    costs.refresh(np.array((0, 0)))
    costs.resize(costs.models[:1])
    assert len(costs.times) == 1
    costs.refresh(np.array((0,)))
    assert costs.times[0].step_s == pytest.approx(known.step_s, rel=1e-6)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.builds(StepWork, st.integers(0, 8_192), st.integers(0, 256), st.integers(0, 500_000)),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_steps_say_the_times_are_finite_and_not_negative(
    steps: list[tuple[int, StepWork, float]],
) -> None:
    costs = FleetCosts()
    costs.resize([StepCostModel() for _ in range(3)])
    for number, (engine, work, seconds) in enumerate(steps):
        costs.observe(engine, work, seconds)
        if number % 5 == 4:
            costs.refresh(np.zeros(3, dtype=np.int64))
    for times in costs.times:
        assert all(np.isfinite(value) and value >= 0.0 for value in times)


def test_a_pool_that_cannot_be_computed_leaves_what_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = FleetCosts()
    costs.resize([StepCostModel(), StepCostModel()])
    before = list(costs.times)

    def singular(*_: object) -> None:
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(np.linalg, "inv", singular)
    costs.refresh(np.array((0, 0)))
    assert costs.times == before
