from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.dispatch.snapshot_load import LOAD_S, LOAD_S_PER_TOKEN, held_by_snapshot


def fleet_of(*prefill_s: float) -> FleetState:
    fleet = FleetState(len(prefill_s))
    for slot, seconds in enumerate(prefill_s):
        fleet.report(slot, EngineReport(0.0, 0, 0.02, seconds, 1e-5))
    return fleet


def test_what_is_left_to_compute_takes_as_long_as_the_load() -> None:
    fleet = fleet_of(2e-5, 1e-3)
    held = held_by_snapshot(fleet, 10_000)
    for slot, tokens in held.items():
        seconds = (10_000 - tokens) * fleet.prefill_s_per_token[slot]
        expected = LOAD_S + LOAD_S_PER_TOKEN * 10_000
        assert abs(seconds - expected) <= fleet.prefill_s_per_token[slot]


def test_a_load_that_takes_longer_than_computing_saves_nothing() -> None:
    assert held_by_snapshot(fleet_of(2e-5), 90) == {0: 0}
    assert held_by_snapshot(fleet_of(2e-5), 0) == {0: 0}


def test_an_engine_whose_times_are_not_known_holds_nothing_rather_than_fail() -> None:
    assert held_by_snapshot(fleet_of(0.0), 5_000) == {0: 0}
