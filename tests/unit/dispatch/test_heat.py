import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.dispatch.entropy import entropy_of
from zerolayer.dispatch.heat import entropy_shares, heat_of

shares_of_one = st.floats(0.0, 2.0)


@given(st.lists(st.tuples(shares_of_one, shares_of_one, shares_of_one), min_size=1, max_size=20))
def test_the_shares_of_a_domain_add_up_to_its_objective(
    engines: list[tuple[float, float, float]],
) -> None:
    util, mem, link = np.array(engines).T
    shares = entropy_shares(util, mem, link)
    assert shares.sum() == pytest.approx(entropy_of(util, mem, link), abs=1e-9)


def fleet_of(streams: list[int]) -> FleetState:
    fleet = FleetState(len(streams))
    for engine, count in enumerate(streams):
        fleet.set_standing(engine, accepts=True)
        fleet.set_capacity(engine, requests_max=16, kv_tokens=10_000)
        for _ in range(count):
            fleet.placed(engine, 10)
    return fleet


def test_in_an_even_fleet_nobody_adds_to_the_objective() -> None:
    heat = heat_of(fleet_of([3, 3, 3]))
    assert heat.objective == pytest.approx(0.0, abs=1e-12)
    assert heat.util[0] > 0.0


def test_the_engine_that_stands_out_has_the_largest_share() -> None:
    heat = heat_of(fleet_of([2, 9, 2, 2]))
    assert int(heat.share.argmax()) == 1
    assert heat.share[0] == pytest.approx(heat.share[2])


def test_engines_of_different_domains_are_not_compared() -> None:
    fleet = fleet_of([2, 9])
    fleet.set_domain(1, 1)
    assert heat_of(fleet).objective == pytest.approx(0.0)


def test_an_engine_that_takes_nothing_is_left_out() -> None:
    fleet = fleet_of([2, 9, 2])
    fleet.set_standing(1, accepts=False)
    heat = heat_of(fleet)
    assert heat.share.tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_memory_in_use_is_the_measured_one() -> None:
    fleet = fleet_of([0])
    fleet.report(0, EngineReport(0.4, 0, 0.05, 0.001, 0.001))
    assert heat_of(fleet).mem[0] == pytest.approx(0.4)
