import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.drain_rule import DrainRule, DrainThresholds

HOT = (0.93, 0.96)
EDGE = (0.90, 0.96)
COOL = (0.80, 0.96)
SAMPLES = st.lists(st.tuples(st.floats(0.0, 1.2), st.floats(0.0, 1.0)), max_size=30)


def run(rule: DrainRule, samples: list[tuple[float, float]]) -> list[bool]:
    return [rule.sample(0, util, mem) for util, mem in samples]


def test_three_samples_in_a_row_make_an_engine_hot_and_two_do_not() -> None:
    assert run(DrainRule(1), [HOT, HOT, COOL, HOT, HOT, HOT]) == [False] * 5 + [True]


@pytest.mark.parametrize("other", [(0.99, 0.5), (0.5, 0.99), (0.92, 0.99), (0.99, 0.95)])
def test_both_figures_must_be_over_their_marks(other: tuple[float, float]) -> None:
    assert not any(run(DrainRule(1), [other] * 6))


def test_at_the_edge_it_stays_hot_and_below_the_lower_mark_it_cools_after_three() -> None:
    rule = DrainRule(1)
    run(rule, [HOT] * 3)
    assert run(rule, [EDGE] * 5) == [True] * 5
    assert run(rule, [COOL, COOL, EDGE, COOL, COOL, COOL]) == [True] * 5 + [False]


@given(samples=SAMPLES, samples_in_a_row=st.integers(1, 4))
def test_the_state_never_changes_without_as_many_samples_in_a_row(
    samples: list[tuple[float, float]], samples_in_a_row: int
) -> None:
    marks = DrainThresholds(samples=samples_in_a_row)
    states = [False, *run(DrainRule(1, marks), samples)]
    for at in range(1, len(states)):
        if states[at] != states[at - 1]:
            last = samples[max(0, at - samples_in_a_row) : at]
            assert len(last) == samples_in_a_row
            if states[at]:
                assert all(u > marks.util_over and m > marks.mem_over for u, m in last)
            else:
                assert all(u < marks.util_under or m < marks.mem_under for u, m in last)


def test_what_could_not_be_read_changes_nothing() -> None:
    rule = DrainRule(1)
    assert run(rule, [HOT, HOT, (math.nan, 0.5), HOT]) == [False, False, False, True]


def test_engines_are_told_apart_and_a_new_one_is_not_hot() -> None:
    rule = DrainRule(2)
    states = [rule.sample_all([0.99, 0.1], [0.99, 0.1]) for _ in range(3)]
    assert states[-1] == [True, False]
    rule.forget(0)
    assert rule.sample_all([0.99, 0.1, 0.99], [0.99, 0.1, 0.99]) == [False, False, False]
    assert rule.sample_all([0.99], [0.99]) == [False]


@pytest.mark.parametrize(
    "wrong", [{"util_under": 0.95}, {"mem_under": 0.95}, {"util_over": 1.2}, {"samples": 0}]
)
def test_marks_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DrainThresholds(**wrong)  # type: ignore[arg-type]
