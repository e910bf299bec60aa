import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import (
    HORIZON_S,
    EngineReport,
    FleetState,
    HardwareReport,
    MemoryReport,
)
from zerolayer.core.limits import ENGINES_MAX


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4_000), st.booleans()), max_size=40))
def test_counts_return_to_zero_when_every_stream_is_released(
    streams: list[tuple[int, int, bool]],
) -> None:
    fleet = FleetState(4)
    held = 1_000
    for engine, prompt, _ in streams:
        fleet.placed(engine, prompt, prompt + held)
    assert fleet.running_requests.sum() == len(streams)
    assert fleet.waiting_tokens.sum() == sum(prompt for _, prompt, _ in streams)
    assert fleet.waiting_context.sum() == fleet.waiting_tokens.sum() + held * len(streams)
    for engine, prompt, began in streams:
        if began:
            fleet.first_token(engine, prompt, prompt + held)
            fleet.grew(engine, 7)
            fleet.released(engine, waiting_tokens=0, running_tokens=prompt + held + 7)
        else:
            context = prompt + held
            fleet.released(engine, waiting_tokens=prompt, running_tokens=0, context_tokens=context)
    for counts in (
        fleet.running_requests, fleet.waiting_tokens, fleet.waiting_context, fleet.running_tokens,
    ):  # fmt: skip
        assert not counts.any()


def test_a_release_after_the_engine_was_emptied_does_not_go_below_zero() -> None:
    fleet = FleetState(2)
    fleet.placed(0, 100)
    fleet.emptied(0)
    fleet.released(0, waiting_tokens=100, running_tokens=0)
    assert (fleet.running_requests[0], fleet.waiting_tokens[0]) == (0, 0)


def test_context_of_streams_that_have_their_blocks_does_not_queue() -> None:
    fleet = FleetState(2)
    for context in (1_000, 2_000, 6_000):
        fleet.placed(1, 10, context)
    assert fleet.queued_context.tolist() == [0.0, 9_000.0]
    queued = []
    for admitted in (0, 1, 3, 7):
        fleet.report(1, EngineReport(0.5, 0, 0.05, 1e-3, 1e-3, admitted_requests=admitted))
        queued.append(fleet.queued_context[1])
    assert queued == pytest.approx([9_000, 6_000, 0, 0])
    fleet.placed(1, 10, 500)
    assert fleet.queued_context[1] == 500
    fleet.emptied(1)
    assert not fleet.queued_context.any()


def test_a_new_fleet_accepts_nothing() -> None:
    assert not FleetState(3).accepts.any()


@pytest.mark.parametrize("engines", [0, ENGINES_MAX + 1])
def test_a_fleet_outside_its_limits_is_refused(engines: int) -> None:
    with pytest.raises(ValueError, match="1 to 256"):
        FleetState(engines)


def test_a_fleet_that_grows_and_shrinks_keeps_what_its_engines_have() -> None:
    fleet = FleetState(2)
    fleet.set_standing(1, accepts=True)
    fleet.placed(1, 7)
    fleet.resize(4)
    assert fleet.accepts.tolist() == [False, True, False, False]
    assert fleet.waiting_tokens.tolist() == [0.0, 7.0, 0.0, 0.0]
    assert fleet.forecast_util.shape == (4, HORIZON_S)
    fleet.resize(2)
    assert fleet.running_requests.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="0"):
        fleet.resize(0)


def test_what_was_ever_placed_never_falls() -> None:
    fleet = FleetState(2)
    fleet.placed(1, 100)
    fleet.first_token(1, 100)
    fleet.placed(1, 20)
    fleet.emptied(1)
    assert fleet.placed_tokens.tolist() == [0.0, 120.0]


def test_what_counters_say_is_forgotten_with_the_engine_and_with_its_slot() -> None:
    fleet = FleetState(3)
    neighbours = [fleet.has_neighbours]
    for engine in (1, 2):
        fleet.hardware(engine, HardwareReport(gpu_busy=0.9, foreign_util=0.3, pcie_use=0.2))
    neighbours.append(fleet.has_neighbours)
    fleet.emptied(1)
    assert (fleet.gpu_busy[1], fleet.foreign_util[1], fleet.pcie_use[1]) == (-1.0, 0.0, 0.0)
    neighbours.append(fleet.has_neighbours)
    fleet.resize(2)
    neighbours.append(fleet.has_neighbours)
    assert neighbours == [False, True, True, False]


@pytest.mark.parametrize(("snapshots", "pcie", "use"), [(0.1, 0.4, 0.4), (0.5, 0.4, 0.5)])
def test_link_use_is_the_larger_share_of_snapshots_and_pcie(
    snapshots: float, pcie: float, use: float
) -> None:
    fleet = FleetState(1)
    fleet.hardware(0, HardwareReport(pcie_use=pcie))
    fleet.picture(0, MemoryReport(10, 10, snapshots, 0.0))
    assert fleet.link_use[0] == use
