"""Laws of the load forecast."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import HORIZON_S, EngineReport, FleetState
from zerolayer.dispatch.load import Appraisal
from zerolayer.dispatch.outlook import NO_STREAMS, NOWHERE, Outlook, Streams
from zerolayer.dispatch.policies import LeastRequests, PlacementRequest
from zerolayer.dispatch.request_cost import (
    PredictionErrors,
    decode_places,
    prefill_demand,
    request_cost,
)

SECOND_NS = 1_000_000_000
ENGINES = 4
ROWS = st.lists(
    st.tuples(
        st.integers(0, ENGINES - 1), st.integers(1, 20_000), st.integers(0, 3_000), st.booleans()
    ),
    max_size=40,
)
REQUESTS = st.builds(
    PlacementRequest,
    prompt_tokens=st.integers(1, 30_000),
    held_tokens=st.none() | st.dictionaries(st.integers(0, ENGINES - 1), st.integers(0, 30_000)),
)


def idle(engines: int = ENGINES) -> FleetState:
    fleet = FleetState(engines)
    for engine in range(engines):
        fleet.set_standing(engine, accepts=True)
        fleet.set_capacity(engine, requests_max=32, kv_tokens=200_000)
        fleet.report(engine, EngineReport(0.0, 0, 0.02 + 0.01 * engine, 1e-4, 1e-4))
    return fleet


def streams_of(rows: list[tuple[int, int, int, bool]]) -> Streams:
    return Streams.of(
        [
            (engine, context, 0 if waits else delivered, context if waits else 0)
            for engine, context, delivered, waits in rows
        ]
    )


def loaded(rows: list[tuple[int, int, int, bool]]) -> FleetState:
    """A fleet whose counts agree with these streams."""
    fleet = idle()
    for engine, context, _, waits in rows:
        fleet.placed(engine, context)
        if not waits:
            fleet.first_token(engine, context)
    return fleet


def taught(answers: int = 300) -> Outlook:
    outlook = Outlook(ENGINES)
    for number in range(answers):
        outlook.finished(1 + (number * 37) % 400)
    return outlook


@given(ROWS, st.integers(0, 50))
def test_no_forecast_is_negative(rows: list[tuple[int, int, int, bool]], per_s: int) -> None:
    fleet, outlook = loaded(rows), taught()
    for number in range(3 * per_s):
        outlook.arrived(number * SECOND_NS // max(1, per_s), 500)
    outlook.refresh(3 * SECOND_NS, fleet, streams_of(rows))
    assert (fleet.forecast_util >= 0.0).all()
    assert (fleet.forecast_mem >= 0.0).all()
    assert np.isfinite(fleet.forecast_util).all()


@given(ROWS)
def test_without_new_traffic_load_never_rises(rows: list[tuple[int, int, int, bool]]) -> None:
    """Streams end and backlogs are worked off. (Waiting streams begin to decode, so both counts
    fall for sure only where all streams decode.)"""
    rows = [(engine, context, delivered, False) for engine, context, delivered, _ in rows]
    fleet, outlook = loaded(rows), taught()
    outlook.refresh(SECOND_NS, fleet, streams_of(rows))
    assert (np.diff(fleet.forecast_util, axis=1) <= 1e-12).all()


def test_a_fleet_without_streams_and_traffic_is_forecast_idle() -> None:
    fleet, outlook = idle(), taught()
    outlook.arrived(0, 1_000)
    outlook.refresh(100 * SECOND_NS, fleet, NO_STREAMS)
    assert not fleet.forecast_util.any()
    assert not fleet.forecast_mem.any()


@given(ROWS, st.integers(1, 5_000), st.integers(0, ENGINES - 1))
def test_a_placement_adds_what_the_next_refresh_finds(
    rows: list[tuple[int, int, int, bool]], own: int, engine: int
) -> None:
    """Nearly: a refresh also sees that the others decode more slowly beside half a second of
    prefill."""
    request = PlacementRequest(own)
    at_once, later = loaded(rows), loaded(rows)
    for fleet in (at_once, later):  # places follow the mean context, which is not what is compared
        fleet.kv_tokens[:] = 1e12
    outlook = taught()
    outlook.refresh(SECOND_NS, at_once, streams_of(rows))
    outlook.placed(at_once, engine, request)
    after = taught()
    later.placed(engine, own)
    after.refresh(SECOND_NS, later, streams_of([*rows, (engine, own, 0, True)]))
    assert at_once.forecast_util == pytest.approx(later.forecast_util, rel=0.03, abs=0.05)
    assert at_once.forecast_mem * 1e12 == pytest.approx(
        later.forecast_mem * 1e12, rel=0.15, abs=500
    )


@given(ROWS, REQUESTS, st.integers(0, ENGINES - 1))
def test_the_cost_of_a_request_is_what_its_placement_adds(
    rows: list[tuple[int, int, int, bool]], request: PlacementRequest, engine: int
) -> None:
    fleet, outlook = loaded(rows), taught()
    outlook.refresh(SECOND_NS, fleet, streams_of(rows))
    cost = request_cost(fleet, request, outlook.lengths)
    util, mem = fleet.forecast_util.copy(), fleet.forecast_mem.copy()
    outlook.placed(fleet, engine, request)
    added = fleet.forecast_util - util
    assert added[engine] == pytest.approx(cost.util[engine], rel=0.03, abs=0.003)
    assert (fleet.forecast_mem - mem)[engine] == pytest.approx(
        cost.mem[engine], rel=0.05, abs=0.001
    )
    assert not np.delete(added, engine, axis=0).any()


@given(ROWS, REQUESTS)
def test_a_request_costs_something_everywhere_and_less_where_its_prefix_is(
    rows: list[tuple[int, int, int, bool]], request: PlacementRequest
) -> None:
    fleet, outlook = loaded(rows), taught()
    cost = request_cost(fleet, request, outlook.lengths)
    bare = request_cost(fleet, PlacementRequest(request.prompt_tokens), outlook.lengths)
    assert (cost.util.sum(axis=1) > 0.0).all()
    assert (cost.ttft_s > 0.0).all()
    assert (cost.ttft_s <= bare.ttft_s + 1e-9).all()


def test_a_backlog_is_worked_off_at_one_second_per_second() -> None:
    demand = prefill_demand(np.array((2.5, 0.5)), np.array(((0.0,) * 5, (0.8,) * 5)))
    assert demand[0].tolist() == [2.5, 1.5, 0.5, 0.0, 0.0]
    assert demand[1] == pytest.approx((1.3, 1.1, 0.9, 0.8, 0.8))


def test_inflow_goes_where_placements_went_and_never_to_a_closed_engine() -> None:
    fleet, outlook = idle(), taught()
    fleet.prefill_s_per_token[:] = 1e-4
    fleet.set_standing(3, accepts=False)
    for number in range(400):
        outlook.arrived(number * SECOND_NS // 20, 1_000)
        outlook.placed(fleet, 0 if number % 4 else 1, PlacementRequest(1_000))
    outlook.refresh(20 * SECOND_NS, fleet, NO_STREAMS)
    util = fleet.forecast_util[:, -1]
    assert util[0] > util[1] > util[2] > util[3] == 0.0


def test_what_is_committed_knows_nothing_of_where_placements_went_lately() -> None:
    """The forecast expects more of an engine that got much; a decision must not."""
    outlook, fleet = taught(), idle()
    for second in range(60):
        outlook.arrived(second * 1_000_000_000, 400)
        outlook.placed(fleet, 0, PlacementRequest(400))
    outlook.refresh(60_000_000_000, fleet, NO_STREAMS)
    case = Appraisal()
    case.take(fleet, PlacementRequest(100))
    case.state_expected(fleet)
    assert case.util[0] > 2.0 * case.util[1]
    case.state_committed(fleet)
    assert case.util.tolist() == [0.0] * ENGINES


@given(ROWS)
def test_a_stream_is_expected_to_stay_for_a_share_of_the_window(
    rows: list[tuple[int, int, int, bool]],
) -> None:
    outlook, fleet = taught(), loaded(rows)
    outlook.refresh(1_000_000_000, fleet, streams_of(rows))
    assert ((fleet.stream_stay >= 0.0) & (fleet.stream_stay <= 1.0 + 1e-9)).all()


def test_prefix_hits_lower_the_prefill_that_is_expected() -> None:
    forecasts = []
    for held in (None, {0: 900}):
        fleet, outlook = idle(1), Outlook(1)
        for number in range(400):
            outlook.arrived(number * SECOND_NS // 20, 1_000)
            outlook.placed(fleet, 0, PlacementRequest(1_000, held_tokens=held))
        outlook.refresh(20 * SECOND_NS, fleet, NO_STREAMS)
        forecasts.append(fleet.forecast_util[0, 0])
    assert forecasts[1] < 0.5 * forecasts[0]


def test_measured_memory_beyond_what_streams_explain_goes_as_they_end() -> None:
    fleet, outlook = loaded([(0, 10_000, 100, False)]), taught()
    fleet.kv_used_fraction[0] = 0.5
    outlook.refresh(SECOND_NS, fleet, streams_of([(0, 10_000, 100, False)]))
    mem = fleet.forecast_mem[0]
    assert 0.4 < mem[0] < 0.5
    assert (np.diff(mem) < 0.0).all()


def test_a_batch_is_spread_and_changes_nothing() -> None:
    fleet, outlook = idle(), taught()
    for number in range(300):
        outlook.arrived(number * SECOND_NS // 30, 100 + number)
    outlook.refresh(10 * SECOND_NS, fleet, NO_STREAMS)
    before, running = fleet.forecast_util.copy(), fleet.running_requests.copy()
    requests = outlook.next_requests()
    engines = outlook.place_batch(fleet, requests, LeastRequests())
    assert len(requests) == 300
    assert np.bincount(engines).tolist() == [75] * ENGINES
    assert np.array_equal(fleet.forecast_util, before)
    assert np.array_equal(fleet.running_requests, running)
    again = outlook.place_batch(fleet, requests, LeastRequests())
    assert np.array_equal(engines, again)


def test_a_batch_says_nowhere_where_no_engine_accepts() -> None:
    outlook = Outlook(2)
    engines = outlook.place_batch(FleetState(2), [PlacementRequest(10)], LeastRequests())
    assert engines.tolist() == [NOWHERE]


def test_an_outlook_follows_a_fleet_that_grows_and_shrinks() -> None:
    fleet, outlook = idle(2), Outlook(2)
    for engines in (5, 1, 3):
        fleet.resize(engines)
        outlook.placed(fleet, engines - 1, PlacementRequest(2_000))
        assert fleet.forecast_util[engines - 1].any()
        outlook.refresh(SECOND_NS, fleet, NO_STREAMS)
        assert fleet.forecast_util.shape == (engines, HORIZON_S)


def test_places_are_the_batch_or_what_the_memory_holds() -> None:
    fleet = idle(2)
    assert decode_places(fleet).tolist() == [32.0, 32.0]
    for _ in range(10):
        fleet.placed(0, 20_000)
    assert decode_places(fleet).tolist() == [10.0, 10.0]
    fleet.kv_tokens[1] = np.inf
    assert decode_places(fleet).tolist() == [10.0, 32.0]


def test_prediction_errors_are_shares_of_what_came() -> None:
    errors = PredictionErrors()
    assert errors.percentiles().count == 0
    for actual in (1.0, 2.0, 4.0, 0.0):
        errors.observe(2.0, actual)
    found = errors.percentiles()
    assert (found.count, found.p50) == (3, 0.5)
    assert found.p90 == pytest.approx(0.9)
