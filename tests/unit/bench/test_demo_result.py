"""When the demo's promise held."""

from dataclasses import replace

import pytest

from zerolayer.bench.demo import act_of
from zerolayer.bench.demo_result import Act, DemoActs, result_of, table_of
from zerolayer.bench.stream_client import ChoiceRecord, StreamRecord
from zerolayer.bench.strike import MoveSeen, Strike

OK = Act("a", 72, 0, 0, True, 100.0, 60.0, False)
BROKEN = replace(OK, broken=True, delivered=24, lost=48, exact=False, gap_ms=None)
GOOD = DemoActs(OK, OK, replace(OK, gap_ms=300.0), replace(OK, exact=False), BROKEN, "", ())


def test_the_promise_holds_when_both_acts_are_exact() -> None:
    result = result_of(GOOD, 100.0)
    assert result["promise_held"]
    assert (result["broken"], result["tokens_lost"], result["tokens_repeated"]) == (0, 0, 0)
    assert (result["exact"], result["gap_ms"]) == (True, 300.0)
    assert result["plain"]["broken"]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, kill=BROKEN),
        replace(GOOD, freeze=replace(OK, lost=1)),
        replace(GOOD, freeze=replace(OK, repeated=1)),
        replace(GOOD, kill=replace(OK, exact=False)),
        replace(GOOD, kill=replace(OK, moved=False)),
        replace(GOOD, left_behind=("1 python",)),
    ],
)
def test_anything_else_breaks_it(wrong: DemoActs) -> None:
    assert not result_of(wrong, 1.0)["promise_held"]


def test_what_could_not_be_measured_says_so() -> None:
    without = replace(GOOD, plain=None, plain_missing="vllm serve ended")
    assert result_of(without, 1.0)["plain"] == {"not_measured": "vllm serve ended"}
    assert table_of(without).row_count == 5


def test_a_stream_that_never_spoke_again_has_no_gap() -> None:
    choice = ChoiceRecord([1, 2, 3], [10, 20, 30], "abc", None)
    record = StreamRecord(response_id="x", http_status=200, choices={0: choice})
    act = act_of("t", [1, 2, 3, 4, 5], record, 35, [])
    assert (act.broken, act.lost, act.gap_ms, act.moved) == (True, 2, None, False)


def test_the_gap_is_looked_for_from_the_fault_on() -> None:
    ms = 1_000_000
    choice = ChoiceRecord([1, 2, 3, 4], [0, 900 * ms, 950 * ms, 1150 * ms], "abcd", "length")
    record = StreamRecord(response_id="x", http_status=200, choices={0: choice}, done=True)
    moves = [MoveSeen(20.0, 980 * ms, 70.0, 9)]
    act = act_of("t", [1, 2, 3, 4], record, 960 * ms, moves)
    assert (act.exact, act.moved, act.gap_ms, act.restored_tokens) == (True, True, 200.0, 9)
    assert act.other_gap_ms == 0.0


def test_only_moves_of_this_stream_count() -> None:
    strike = Strike("kill", 5, struck_ns=1_000_000_000, struck_unix=100.0)
    mine = {
        "external_id": "x-0", "declared_unix": 100.25, "after_declared_ms": 7.0,
        "restored_tokens": 3, "from": "e1", "reason": "it died",
    }  # fmt: skip
    status = {"recent_moves": [mine, {**mine, "external_id": "y-0"}]}
    seen = strike.moves_of(StreamRecord(response_id="x"), status)
    assert seen == [MoveSeen(250.0, 1_250_000_000, 7.0, 3, "e1", "it died")]
    assert strike.moves_of(StreamRecord(), status) == []
