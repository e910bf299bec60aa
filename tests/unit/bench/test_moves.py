"""What `bench roll` and `bench offload` make of what they saw."""

from typing import Any

import pytest

from zerolayer.bench.offload import OffloadOptions, Side, compared
from zerolayer.bench.roll import RollOptions, judged
from zerolayer.bench.stream_client import ChoiceRecord, StreamRecord
from zerolayer.core.errors import ConfigError

MS = 1_000_000
REFERENCE = list(range(100, 140))


def record(tokens: list[int], gap_ms: int = 50, worst_ms: int = 50, **other: Any) -> StreamRecord:
    at = [MS * (1000 + gap_ms * n + (worst_ms - gap_ms) * (n > 5)) for n in range(len(tokens))]
    choice = ChoiceRecord(list(tokens), at, "", "length")
    return StreamRecord(choices={0: choice}, done=True, **other)


def test_a_roll_that_nobody_noticed_is_exact() -> None:
    found = judged([REFERENCE], [record(REFERENCE)], [[record(REFERENCE, worst_ms=120)] * 3])
    assert (found["streams"], found["broken"], found["exact"]) == (3, 0, True)
    assert (found["tokens_lost"], found["tokens_repeated"]) == (0, 0)
    assert found["worst_gap_of_each_client_ms"] == [120.0]
    assert found["undisturbed_worst_gap_ms"]["max"] == 50.0


def test_lost_repeated_and_broken_streams_are_counted() -> None:
    lost = record(REFERENCE[:10] + REFERENCE[12:])
    again = record(REFERENCE[:10] + REFERENCE[8:])
    cut = record(REFERENCE[:20], connection_error="cut")
    found = judged([REFERENCE], [record(REFERENCE)], [[lost, again, cut]])
    assert (found["tokens_lost"], found["tokens_repeated"]) == (2 + 20, 2)
    assert (found["broken"], found["exact"]) == (1, False)


def test_without_repeatable_undisturbed_runs_exactness_is_not_judged() -> None:
    other = record([*REFERENCE[:5], 7, *REFERENCE[6:]])
    found = judged([REFERENCE], [other], [[other]])
    assert (found["exact"], found["differing"], found["undisturbed_differing"]) == (None, 1, 1)


def test_offload_is_compared_by_the_median_of_each_rounds_worst_gap() -> None:
    with_it = Side(round_worst_ms=[100.0, 120.0, 500.0])
    without = Side(round_worst_ms=[300.0, 240.0, 200.0])
    with_it.moves = [{"reason": "offload: slow", "gap_ms": 110.0, "after_declared_ms": 80.0}] * 3
    found = compared({True: with_it, False: without})
    assert found["worst_gap_ratio"] == 0.5
    assert found["with_offload"]["moves_by_reason"] == {"offload: slow": 3}
    assert found["without_offload"]["moves"] == 0


@pytest.mark.parametrize(
    "options",
    [
        RollOptions("m", engines=1),
        RollOptions("m", streams=0),
        OffloadOptions("m", factors=(1,)),
        OffloadOptions("m", factors=()),
        OffloadOptions("m", rounds=0),
    ],
)
def test_what_cannot_be_measured_is_refused(options: RollOptions | OffloadOptions) -> None:
    with pytest.raises(ConfigError):
        options.check()
