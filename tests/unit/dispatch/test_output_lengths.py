"""Laws of the distribution of output lengths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.dispatch.output_lengths import PRIOR_MEAN_TOKENS, TOKENS_MAX, OutputLengths

LENGTHS = st.lists(st.integers(1, 50_000), max_size=60)


def learned(lengths: list[int]) -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.observe(length)
    return known


@given(LENGTHS, st.integers(0, 2 * TOKENS_MAX))
def test_something_positive_and_finite_is_always_still_to_come(
    lengths: list[int], delivered: int
) -> None:
    rest = learned(lengths).expected_remaining(delivered)
    assert 1.0 <= rest <= TOKENS_MAX


@given(LENGTHS, st.integers(0, 60_000), st.lists(st.floats(0.0, 1e5), min_size=2, max_size=20))
def test_survivors_never_become_more(
    lengths: list[int], delivered: int, further: list[float]
) -> None:
    known = learned(lengths)
    survivors = [known.survival(delivered, tokens) for tokens in sorted(further)]
    assert all(0.0 <= later <= now <= 1.0 for now, later in pairwise(survivors))
    assert known.survival(delivered, 0.0) == 1.0


@given(LENGTHS, st.integers(0, 1000))
def test_quantiles_rise_and_survival_at_a_quantile_is_what_it_leaves(
    lengths: list[int], delivered: int
) -> None:
    known = learned(lengths)
    tokens = [known.quantile(q, delivered) for q in (0.1, 0.5, 0.9)]
    assert tokens == sorted(tokens)
    assert known.survival(delivered, tokens[1]) == pytest.approx(0.5, abs=0.01)


@given(LENGTHS, st.integers(0, 5_000))
def test_the_expected_rest_is_the_sum_of_survival(lengths: list[int], delivered: int) -> None:
    known = learned(lengths)
    steps = np.arange(delivered, TOKENS_MAX, dtype=np.float64)
    alive = known.survival_at(steps)
    assert known.expected_remaining(delivered) == pytest.approx(
        max(1.0, float(alive.sum() / alive[0])), rel=1e-6
    )


def test_before_any_answer_the_longer_one_is_the_longer_it_will_be() -> None:
    prior = OutputLengths()
    assert prior.expected_remaining() == pytest.approx(PRIOR_MEAN_TOKENS, rel=0.01)
    rests = [prior.expected_remaining(delivered) for delivered in (0, 100, 1_000, 10_000)]
    assert rests == sorted(rests)


def test_the_mean_of_a_thousand_equal_answers_is_known_to_a_few_percent() -> None:
    for length in (1, 7, 100, 1_000, 20_000):
        rest = learned([length] * 1_000).expected_remaining()
        assert rest == pytest.approx(length, rel=0.08, abs=0.5)  # the prior's share is 0.4 tokens


def test_old_lengths_are_forgotten() -> None:
    known = learned([2_000] * 1_000 + [20] * 5_000)
    assert known.expected_remaining() < 40.0


def test_an_answer_longer_than_all_before_still_has_a_rest() -> None:
    assert learned([100] * 5_000).expected_remaining(10_000) > 1_000.0


def test_weights_stay_finite_over_a_million_answers() -> None:
    known = OutputLengths()
    known._next_weight = 1e199
    for _ in range(5_000):
        known.observe(50)
    assert known.expected_remaining() == pytest.approx(50.0, rel=0.08)


def test_answers_that_still_run_keep_the_short_ones_from_speaking_for_all() -> None:
    """Of 100 answers that began together, half are 50 tokens long and half 4,000; 100 tokens in."""
    known = learned([50] * 50)
    alone = known.expected_remaining()
    known.running(np.full(50, 100.0), 1.0)
    assert alone < 100.0
    assert known.survival(0, 90.0) == pytest.approx(0.5, abs=0.05)
    assert known.expected_remaining() > 3.0 * alone


@given(LENGTHS, st.lists(st.integers(0, 2 * TOKENS_MAX), max_size=50))
def test_survival_begins_at_one_and_falls_whatever_runs(
    lengths: list[int], running: list[int]
) -> None:
    known = learned(lengths)
    known.running(np.array(running, dtype=np.float64), 1.0)
    survival = known.survival_at(np.arange(0.0, 60_000.0, 97.0, dtype=np.float64))
    assert survival[0] == 1.0
    assert (np.diff(survival) <= 0.0).all()
    assert (survival > 0.0).all()
    assert np.isfinite(known.expected_remaining(300_000))
