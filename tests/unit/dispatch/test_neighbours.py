"""Laws of utilisation beside other programs on an engine's GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.dispatch.test_policies import ENGINE, FLEETS, REQUESTS, build, idle
from zerolayer.core.fleet_state import EngineReport, FleetState, HardwareReport
from zerolayer.dispatch.load import Appraisal
from zerolayer.dispatch.neighbours import beside_neighbours
from zerolayer.dispatch.outlook import Outlook, Streams
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.policies.registry import POLICIES
from zerolayer.dispatch.policies.zerolayer import ZeroLayer

SHARES = st.floats(0.0, 0.95)
NOBODY: frozenset[int] = frozenset()


def neighbour(fleet: FleetState, engine: int, share: float) -> None:
    fleet.hardware(engine, HardwareReport(foreign_util=share))


def appraised(fleet: FleetState, request: PlacementRequest) -> Appraisal:
    case = Appraisal()
    case.take(fleet, request)
    case.state_now(fleet)
    return case


@given(share=SHARES, own_s=st.floats(0.0, 0.9))
def test_prefill_that_a_neighbour_stretches_counts_once(share: float, own_s: float) -> None:
    """Of each second the neighbour takes `share` and our prefill, were it alone, `own_s`."""
    fleet = FleetState(1)
    neighbour(fleet, 0, share)
    util = np.array([own_s / (1.0 - share)])  # what its own steps say
    beside_neighbours(fleet, util)
    assert util[0] == pytest.approx(share + own_s)


@given(engines=FLEETS, request=REQUESTS, share=SHARES)
def test_a_neighbour_adds_to_a_free_engine_and_never_makes_a_full_one_fuller(
    engines: list[dict[str, float]], request: PlacementRequest, share: float
) -> None:
    alone, beside = build(engines), build(engines)
    neighbour(beside, 0, share)
    before, after = appraised(alone, request), appraised(beside, request)
    assert np.array_equal(before.util[1:], after.util[1:])
    low, high = sorted((float(before.util[0]), 1.0))
    assert low - 1e-9 <= after.util[0] <= high + 1e-9
    assert after.util_added[0] == pytest.approx((1.0 - share) * before.util_added[0])
    assert np.array_equal(before.mem, after.mem)


@given(share=SHARES, streams=st.integers(0, 20))
def test_load_before_and_after_a_placement_is_told_by_the_same_formula(
    share: float, streams: int
) -> None:
    fleet = idle(1)
    fleet.set_capacity(0, requests_max=32, kv_tokens=1e6)
    for _ in range(streams):
        fleet.placed(0, 0)
    request = PlacementRequest(0, 1_000_000)  # decodes through the whole window
    neighbour(fleet, 0, share)
    said = float(appraised(fleet, request).after[0, 0])
    fleet.placed(0, 0)
    own = appraised(fleet, request)
    prefill = float(fleet.prefill_s_per_token[0]) / 5.0  # of one token, the least that there is
    assert said == pytest.approx(float(own.util[0]) + (1.0 - share) * prefill)


def test_of_two_idle_engines_the_one_without_a_neighbour_is_taken() -> None:
    fleet = idle(2)
    neighbour(fleet, 0, 0.5)
    decision = ZeroLayer().choose(fleet, PlacementRequest(100, 100), NOBODY)
    assert decision is not None
    assert decision.engine == 1


def test_the_forecast_has_neighbours_in_every_second_and_does_not_add_them_twice() -> None:
    streams = Streams.of([(0, 200, 50, 0), (1, 200, 50, 0)])
    said = []
    for share in (0.0, 0.25):
        fleet, outlook = idle(2), Outlook(2)
        for engine in (0, 1):
            fleet.report(engine, EngineReport(0.0, 0, 0.02, 1e-4, 1e-4))
            fleet.placed(engine, 200)
            fleet.first_token(engine, 200)
        neighbour(fleet, 0, share)
        for second in range(3):
            outlook.refresh(second * 10**9, fleet, streams)
        said.append(fleet.forecast_util.copy())
    alone, beside = said
    assert np.allclose(beside[1], alone[1])
    assert np.allclose(beside[0], 0.25 + 0.75 * alone[0])


@given(engines=st.lists(ENGINE, min_size=1, max_size=6), request=REQUESTS, share=SHARES)
def test_every_policy_still_answers_beside_neighbours(
    engines: list[dict[str, float]], request: PlacementRequest, share: float
) -> None:
    fleet = build(engines)
    neighbour(fleet, 0, share)
    for name in ("zerolayer", "entropy_source"):
        POLICIES[name].make(_NoChance()).choose(fleet, request, NOBODY)


class _NoChance:
    """These two roll no dice."""

    def random(self) -> float:
        raise AssertionError

    def randrange(self, stop: int) -> int:
        raise AssertionError
