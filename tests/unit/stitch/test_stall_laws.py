"""Laws of the stall detector under any evidence at all, and of what it remembers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from zerolayer.stitch.stall import (
    Clear,
    Commit,
    EngineEvidence,
    Phase,
    Reason,
    StallConfig,
    StallDetector,
    Suspect,
)
from zerolayer.stitch.stall_history import (
    MINUTE_NS,
    SECOND_NS,
    MoveBudget,
    Readmission,
    StepHistory,
)

MS = 1_000_000


@st.composite
def evidences(draw: st.DrawFn) -> list[dict[int, EngineEvidence]]:
    """Ticks with anything that a damaged board and a confused process table may show."""
    ticks, now_ns = [], SECOND_NS
    for _ in range(draw(st.integers(1, 25))):
        now_ns += draw(st.sampled_from((0, 1, 10 * MS, 20 * MS, 90 * MS, 2 * SECOND_NS)))
        ticks.append(
            {
                slot: EngineEvidence(
                    now_ns=now_ns,
                    owes_work=draw(st.booleans()),
                    step_seq=draw(st.integers(0, 5)),
                    step_started_ns=draw(st.sampled_from((0, 1, now_ns - 5 * SECOND_NS, now_ns))),
                    prefill_tokens=draw(st.sampled_from((0, 2_000))),
                    decode_requests=1,
                    context_tokens=100,
                    expected_ns=draw(st.sampled_from((-1, 0, 50 * MS, 10**15))),
                    last_output_ns=draw(st.sampled_from((0, now_ns, now_ns + SECOND_NS))),
                    process_gone=draw(st.sampled_from((False, False, False, True))),
                    stopped=draw(st.booleans()),
                    cpu_ns=draw(st.sampled_from((None, 0, 10**9))),
                    runnable=draw(st.booleans()),
                    streams=draw(st.integers(0, 1_000)),
                    step_ended_ns=draw(st.sampled_from((0, now_ns, 2**62))),
                )
                for slot in draw(st.sets(st.integers(0, 3)))
            }
        )
    return ticks


@given(evidences(), st.integers(0, 4))
def test_verdicts_follow_the_life_of_an_engine_whatever_the_evidence(
    ticks: list[dict[int, EngineEvidence]], proof: int
) -> None:
    detector = StallDetector(StallConfig())
    phases = dict.fromkeys(range(4), Phase.CLEAR)
    for evidence in ticks:
        now_ns = max((one.now_ns for one in evidence.values()), default=0)
        detector.proved(proof, now_ns)
        for verdict in detector.tick(now_ns, evidence):
            if isinstance(verdict, Suspect):
                assert phases[verdict.engine] is Phase.CLEAR
                phases[verdict.engine] = Phase.SUSPECT
            elif isinstance(verdict, Commit):
                assert phases[verdict.engine] is not Phase.COMMITTED
                gone = verdict.reason is Reason.GONE
                assert gone == evidence[verdict.engine].process_gone
                assert gone or evidence[verdict.engine].owes_work
                phases[verdict.engine] = Phase.COMMITTED
            elif isinstance(verdict, Clear):
                assert phases[verdict.engine] is not Phase.CLEAR
                phases[verdict.engine] = Phase.CLEAR
        assert phases == {slot: detector.phase(slot) for slot in phases}


@settings(max_examples=40)
@given(evidences())
def test_the_same_evidence_gets_the_same_verdicts(
    ticks: list[dict[int, EngineEvidence]],
) -> None:
    first, second = StallDetector(StallConfig()), StallDetector(StallConfig())
    for number, evidence in enumerate(ticks):
        now_ns = SECOND_NS + number * 20 * MS
        assert first.tick(now_ns, evidence) == second.tick(now_ns, evidence)


@given(st.lists(st.floats(0, 1_000), max_size=200))
def test_usual_lateness_stays_between_one_and_its_cap(ratios: list[float]) -> None:
    history = StepHistory()
    for ratio in ratios:
        history.add(ratio)
        assert 1.0 <= history.usual <= StepHistory.USUAL_MAX
    assert history.warm == (len(ratios) >= StepHistory.WARM_STEPS)


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 30 * SECOND_NS), st.integers(1, 40)), max_size=40),
)
def test_no_minute_has_more_moves_than_allowed_but_for_its_first_engine(
    allowed: int, asked: list[tuple[int, int]]
) -> None:
    budget, now_ns, taken = MoveBudget(), 0, list[tuple[int, int]]()
    for after_ns, streams in asked:
        now_ns += after_ns
        if budget.take(now_ns, streams, allowed):
            taken.append((now_ns, streams))
    for at_ns, _ in taken:
        minute = [streams for then, streams in taken if at_ns - MINUTE_NS < then <= at_ns]
        assert sum(minute) <= allowed or len(minute) == 1


def test_a_budget_of_zero_moves_nothing_unless_it_must() -> None:
    budget = MoveBudget()
    assert not budget.take(0, 1, 0)
    assert budget.take(0, 1, 0, force=True)


@given(st.lists(st.integers(1, 200 * SECOND_NS), min_size=1, max_size=30))
def test_a_hold_never_shrinks_while_stalls_keep_coming_and_never_passes_its_cap(
    gaps_ns: list[int],
) -> None:
    readmission, now_ns, before_ns = Readmission(), 0, 0
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        readmission.stalled(now_ns, step_seq=1)
        assert before_ns <= readmission.hold_ns <= Readmission.HOLD_NS_MAX
        assert not readmission.may_return(now_ns + MINUTE_NS, step_seq=2), "no round trip yet"
        before_ns = readmission.hold_ns
