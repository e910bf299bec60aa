"""Laws of comparing a run with its reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.bench.compare import compare, gaps_around, gaps_ms, percentile, summary, worst_gap_ms

TOKENS = st.lists(st.integers(0, 50_000), min_size=0, max_size=60)
DISTINCT = st.lists(st.integers(0, 50_000), min_size=40, max_size=80, unique=True)


@given(TOKENS)
def test_a_run_equals_itself(tokens: list[int]) -> None:
    found = compare(tokens, list(tokens))
    assert found.exact
    assert (found.lost, found.repeated, found.first_difference) == (0, 0, None)


@given(TOKENS, TOKENS)
def test_exact_means_equal(one: list[int], other: list[int]) -> None:
    found = compare(one, other)
    assert found.exact == (one == other)
    assert found.lost >= 0
    assert found.repeated >= 0
    if found.first_difference is not None:
        at = found.first_difference
        assert one[:at] == other[:at]
        assert one[at : at + 1] != other[at : at + 1]


@given(DISTINCT, st.integers(0, 20), st.integers(1, 8))
def test_tokens_left_out_in_the_middle_are_lost(ref: list[int], at: int, count: int) -> None:
    found = compare(ref, ref[:at] + ref[at + count :])
    assert (found.lost, found.repeated, found.first_difference) == (count, 0, at)


@given(DISTINCT, st.integers(8, 20), st.integers(1, 8))
def test_tokens_sent_twice_are_repeated(ref: list[int], at: int, count: int) -> None:
    found = compare(ref, ref[:at] + ref[at - count : at] + ref[at:])
    assert (found.lost, found.repeated, found.first_difference) == (0, count, at)


def test_a_repetition_that_pushes_the_end_out_is_still_a_repetition() -> None:
    ref = list(range(100, 140))
    got = (ref[:20] + ref[17:20] + ref[20:])[: len(ref)]
    found = compare(ref, got)
    assert (found.lost, found.repeated) == (0, 3)


@given(DISTINCT, st.integers(1, 30))
def test_what_is_missing_at_the_end_is_lost(ref: list[int], count: int) -> None:
    found = compare(ref, ref[:-count])
    assert (found.lost, found.repeated) == (count, 0)


def test_other_text_of_the_same_length_loses_nothing() -> None:
    ref = list(range(60))
    found = compare(ref, ref[:20] + list(range(1000, 1040)))
    assert found.other_text
    assert (found.lost, found.repeated, found.first_difference) == (0, 0, 20)


def test_other_text_that_was_cut_off_lost_its_end() -> None:
    ref = list(range(60))
    found = compare(ref, ref[:20] + list(range(1000, 1010)), finished=False)
    assert (found.lost, found.other_text) == (30, True)


def test_text_that_goes_round_in_circles_is_no_loss() -> None:
    circle = [1, 2, 3, 4] * 15
    found = compare(circle, [*circle[:20], 9, *circle[21:]])
    assert found.other_text
    assert (found.lost, found.repeated) == (0, 0)


def test_gaps_are_the_silences_between_tokens() -> None:
    arrivals_ns = [0, 50_000_000, 50_000_000, 350_000_000]
    assert gaps_ms(arrivals_ns) == [50.0, 0.0, 300.0]
    assert worst_gap_ms(arrivals_ns) == 300.0
    assert worst_gap_ms([7]) == 0.0


def test_the_gap_of_a_fault_is_the_one_in_which_it_was_declared() -> None:
    ms = 1_000_000
    # Struck at 55; one token was still under way (60); declared at 80; an engine starts at 300.
    arrivals = [at * ms for at in (0, 50, 60, 210, 260, 900)]
    found = gaps_around(arrivals, 55 * ms, [80 * ms])
    assert (found.at_fault_ms, found.other_ms) == (150.0, 640.0)


def test_silence_after_a_fault_for_ever_is_no_number() -> None:
    assert gaps_around([0, 10], 11, [12]).at_fault_ms is None
    assert gaps_around([], 11, [12]).at_fault_ms is None


def test_a_stream_that_was_not_moved_has_only_other_gaps() -> None:
    found = gaps_around([0, 2_000_000, 5_000_000], 1_000_000, [])
    assert (found.at_fault_ms, found.other_ms) == (0.0, 3.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_one_of_the_values_and_covers_its_share(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found is not None
    assert found in values
    covered = sum(value <= found for value in values)
    assert covered >= share * len(values) - 1e-9


def test_percentiles_of_nothing_are_nothing() -> None:
    assert summary([]) == {"count": 0, "p50": None, "p99": None, "max": None}
    with pytest.raises(ValueError, match="outside"):
        percentile([1.0], 0.0)
