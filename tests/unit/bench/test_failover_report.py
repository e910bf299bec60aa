"""What trials add up to."""

from dataclasses import replace

from zerolayer.bench.compare import compare
from zerolayer.bench.failover_report import Trial, differences, report

REFERENCE = list(range(40))
GOOD = Trial(
    cause="kill", mode="snapshot", context_tokens=100, broken=False, fault="",
    comparison=compare(REFERENCE, REFERENCE), counted_tokens=40, received_tokens=40, gap_ms=120.0,
    other_gap_ms=60.0, declared_ms=(20.0,),
    moved=True, cut_after=10, after_declared_ms=(60.0,), restored_tokens=109,
)  # fmt: skip


def test_a_clean_run_is_exact_and_loses_nothing() -> None:
    result = report([GOOD, replace(GOOD, cause="freeze", gap_ms=200.0)], (100, 1000))
    assert (result["broken"], result["tokens_lost"], result["tokens_repeated"]) == (0, 0, 0)
    assert result["exact_share"] == 1.0
    assert result["gap_ms"] == {"count": 2, "p50": 120.0, "p99": 200.0, "max": 200.0}
    assert result["after_declared_ms"]["p99"] == 60.0
    assert result["by_mode"]["snapshot"]["by_cause"]["freeze"]["streams"] == 1
    assert result["by_mode"]["snapshot"]["restored_from_snapshot"] == 2


def test_top_gaps_are_of_snapshots_and_top_losses_of_everything() -> None:
    slow = replace(GOOD, mode="prefill", gap_ms=5000.0, broken=True, fault="cut")
    result = report([GOOD, slow], (100,))
    assert result["gap_ms"]["max"] == 120.0
    assert (result["streams"], result["broken"]) == (2, 1)
    assert result["faults"] == ["cut"]


def test_what_the_server_counted_and_never_came_is_lost() -> None:
    assert replace(GOOD, counted_tokens=42).lost == 2
    assert replace(GOOD, counted_tokens=39).repeated == 1
    assert replace(GOOD, counted_tokens=None).lost == 0


def test_gaps_grow_with_the_context_by_a_ratio_of_medians() -> None:
    long = replace(GOOD, context_tokens=3500, gap_ms=180.0)
    result = report([GOOD, long], (100, 3500))
    assert result["by_mode"]["snapshot"]["gap_longest_to_shortest_context"] == 1.5
    assert result["by_mode"]["prefill"]["gap_longest_to_shortest_context"] is None


def test_a_difference_before_the_fault_is_not_the_faults() -> None:
    other = REFERENCE[:5] + list(range(900, 935))
    early = replace(GOOD, comparison=compare(REFERENCE, other))
    quiet = replace(GOOD, cause="none", moved=False)
    found = differences([early, GOOD, quiet])
    assert found["moved_by_snapshot"] == {
        "streams": 2, "differing": 1, "differing_share": 0.5, "differing_before_the_fault": 1,
    }  # fmt: skip
    assert found["undisturbed"]["differing_share"] == 0.0
    assert found["not_moved"]["differing_share"] is None


def test_undisturbed_rounds_do_not_count_as_faults() -> None:
    assert report([replace(GOOD, cause="none")], (100,))["streams"] == 0
