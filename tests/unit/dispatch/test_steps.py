from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.dispatch.cost import StepWork
from zerolayer.dispatch.steps import WAITED_SHARE_MAX, FinishedStep, StepSample, StepWatch

MS = 1_000_000
DECODE = StepWork(0, 4, 1_000)
PREFILL = StepWork(500, 0, 0)
Row = tuple[int, int, int, StepWork, int]  # now, seq, started, work, ended; times in ms


def finished(rows: Sequence[Row]) -> list[FinishedStep]:
    watch, found = StepWatch(), []
    for now, seq, started, work, ended in rows:
        sample = StepSample(now * MS, seq, started * MS, work, ended * MS)
        done = watch.sample(sample)
        if done is not None:
            found.append(done)
    return found


@pytest.mark.parametrize(
    ("rows", "seconds", "shortest", "steps"),
    [
        pytest.param(
            [(110, 1, 100, DECODE, 0), (160, 2, 155, DECODE, 150)], 0.05, 0.05, 1, id="next step"
        ),
        pytest.param(
            [(110, 1, 100, DECODE, 0), (160, 1, 0, DECODE, 150)], 0.05, 0.05, 1, id="then idle"
        ),
        pytest.param(
            [(110, 1, 100, DECODE, 0), (160, 2, 155, DECODE, 0)], 0.055, 0.01, 1, id="no end told"
        ),
        pytest.param(
            [(110, 1, 100, DECODE, 90), (160, 1, 100, DECODE, 150)], 0.05, 0.05, 1, id="in place"
        ),
        pytest.param(
            [(101, 1, 100, DECODE, 0), (121, 5, 120, DECODE, 119)], 0.005, 0.005, 4, id="a mean"
        ),
    ],
)
def test_a_step_that_ended_between_samples_is_told(
    rows: Sequence[Row], seconds: float, shortest: float, steps: int
) -> None:
    (step,) = finished(rows)
    assert step.seconds == pytest.approx(seconds)
    assert step.seconds_min == pytest.approx(shortest)
    assert (step.steps, step.work) == (steps, DECODE)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(110, 1, 100, DECODE, 0), (130, 1, 100, DECODE, 0)], id="still running"),
        pytest.param([(110, 1, 0, DECODE, 90), (130, 1, 0, DECODE, 90)], id="idle"),
        pytest.param([(110, 1, 100, DECODE, 0), (130, 5, 125, PREFILL, 124)], id="unlike steps"),
        pytest.param([(110, 1, 100, DECODE, 0), (130, 50, 125, DECODE, 124)], id="too many"),
        pytest.param([(110, 9, 100, DECODE, 0), (130, 1, 125, DECODE, 0)], id="a new process"),
    ],
)
def test_nothing_is_told_of_what_cannot_be_known(rows: Sequence[Row]) -> None:
    assert finished(rows) == []


def test_an_end_that_was_told_is_not_told_again() -> None:
    rows = [
        (110, 1, 100, DECODE, 0),
        (160, 1, 100, DECODE, 150),
        (180, 2, 170, DECODE, 150),
        (230, 2, 0, DECODE, 220),
    ]
    assert [round(step.seconds, 3) for step in finished(rows)] == [0.05, 0.05]


@given(st.lists(st.tuples(*[st.integers(0, 400)] * 3, st.sampled_from([DECODE, PREFILL]),
                          st.integers(0, 400)), max_size=20))  # fmt: skip
def test_garbage_on_a_board_never_gives_a_negative_time(rows: list[Row]) -> None:
    for step in finished(rows):
        assert 0 <= step.seconds_min <= step.seconds
        assert step.steps >= 1


def test_what_a_step_waited_for_a_core_is_told_with_it_and_with_no_other() -> None:
    watch, waited = StepWatch(), []
    for now, seq, started, ended, waited_ms in (
        (110, 1, 100, 0, 1_000),  # before this the engine waited for a second
        (130, 1, 100, 0, 1_015),
        (165, 2, 160, 150, 1_020),
        (210, 3, 205, 200, 1_020),
        (310, 4, 305, 300, 9_000),
    ):
        sample = StepSample(now * MS, seq, started * MS, DECODE, ended * MS, waited_ms * MS)
        if (done := watch.sample(sample)) is not None:
            waited.append((done.waited_s, done.own_s))
    assert np.allclose(
        waited,
        [(0.020, 0.030), (0.0, 0.040), (WAITED_SHARE_MAX * 0.095, (1 - WAITED_SHARE_MAX) * 0.095)],
    )
