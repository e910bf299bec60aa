"""Laws of one stream's life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.outcome import Outcome
from zerolayer.stitch.stream import IllegalTransition, Phase, Stream

EVENTS = st.sampled_from(["place", "leave", "deliver", "end"])


def stream() -> Stream:
    return Stream("cmpl-1", prompt_tokens=5)


@given(st.lists(EVENTS, max_size=40))
def test_an_illegal_event_raises_and_changes_nothing(events: list[str]) -> None:
    one = stream()
    for event in events:
        before = (one.phase, one.engine, one.epoch, list(one.delivered), one.outcome)
        try:
            match event:
                case "place":
                    one.place(3)
                case "leave":
                    one.leave()
                case "deliver":
                    one.deliver([7])
                case "end":
                    one.end(Outcome.FINISHED)
        except IllegalTransition:
            after = (one.phase, one.engine, one.epoch, list(one.delivered), one.outcome)
            assert after == before
        assert (one.engine is not None) == (one.phase is Phase.PLACED)
        assert (one.outcome is not None) == (one.phase is Phase.ENDED)


@given(st.integers(1, 20))
def test_only_the_current_epoch_is_accepted_over_any_number_of_moves(moves: int) -> None:
    one = stream()
    for _ in range(moves):
        one.place(0)
        one.leave()
    one.place(1)
    assert one.epoch == moves
    assert [epoch for epoch in range(moves + 2) if one.accepts(epoch)] == [moves]


def test_a_stream_that_waits_or_has_ended_accepts_nothing() -> None:
    one = stream()
    assert not one.accepts(0)
    one.place(0)
    one.end(Outcome.FINISHED)
    assert not one.accepts(0)


def test_a_stream_ends_once_and_names_the_engine_that_still_works_for_it() -> None:
    one = stream()
    one.place(2)
    assert one.end(Outcome.CLIENT_LEFT) == (2, "cmpl-1@0")
    with pytest.raises(IllegalTransition):
        one.end(Outcome.FINISHED)
    assert one.outcome is Outcome.CLIENT_LEFT


def test_leaving_raises_the_epoch_before_anything_else_can_happen() -> None:
    one = stream()
    assert one.place(4) == "cmpl-1@0"
    assert one.leave() == (4, "cmpl-1@0")
    assert one.request_id == "cmpl-1@1"
