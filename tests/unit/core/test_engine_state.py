import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.engine_state import (
    TRANSITIONS,
    EngineEvent,
    EngineLife,
    EngineState,
    IllegalEngineEvent,
    next_state,
)


@given(st.lists(st.sampled_from(EngineEvent)))
def test_an_illegal_event_raises_and_changes_nothing(events: list[EngineEvent]) -> None:
    life = EngineLife()
    for event in events:
        before = (life.state, life.incarnation)
        if life.can(event):
            assert life.apply(event) == TRANSITIONS[before[0], event]
        else:
            with pytest.raises(IllegalEngineEvent):
                life.apply(event)
            assert (life.state, life.incarnation) == before


@given(st.lists(st.sampled_from(EngineEvent)))
def test_the_incarnation_counts_the_restarts(events: list[EngineEvent]) -> None:
    life = EngineLife()
    legal = []
    for event in events:
        if life.can(event):
            life.apply(event)
            legal.append(event)
    assert life.incarnation == 1 + legal.count(EngineEvent.RESTARTED)


@pytest.mark.parametrize("state", EngineState)
def test_an_engine_can_die_exactly_while_it_has_a_process(state: EngineState) -> None:
    assert ((state, EngineEvent.DIED) in TRANSITIONS) == state.has_process


@pytest.mark.parametrize("state", EngineState)
def test_every_state_can_be_reached_and_left(state: EngineState) -> None:
    assert state is EngineState.STARTING or state in TRANSITIONS.values()
    assert any(source is state for source, _ in TRANSITIONS)


def test_a_dead_engine_comes_back_only_through_a_start() -> None:
    for state in (EngineState.DEAD, EngineState.SET_ASIDE):
        exits = {event for source, event in TRANSITIONS if source is state}
        assert exits <= {EngineEvent.RESTARTED, EngineEvent.GAVE_UP}
        assert next_state(state, EngineEvent.RESTARTED) is EngineState.STARTING


def test_a_stall_does_not_end_a_drain() -> None:
    for event in (EngineEvent.SUSPECTED, EngineEvent.STALLED, EngineEvent.CLEARED):
        assert next_state(EngineState.DRAINING, event) is EngineState.DRAINING


def test_only_ready_and_suspect_engines_take_streams() -> None:
    takes = {state for state in EngineState if state.accepts}
    assert takes == {EngineState.READY, EngineState.SUSPECT}
