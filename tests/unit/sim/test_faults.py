import pytest

from zerolayer.core.errors import ConfigError
from zerolayer.sim.faults import HOUR_S, FaultKind, FleetShape, plan_faults

FLEET = FleetShape(engines=16, gpus=1, restart_s=(50.0, 180.0))


def test_the_same_seed_draws_the_same_plan_and_another_seed_another() -> None:
    one = plan_faults("stress", FLEET, 1, HOUR_S)
    assert plan_faults("stress", FLEET, 1, HOUR_S) == one
    assert plan_faults("stress", FLEET, 2, HOUR_S) != one


def test_more_engines_do_not_change_what_happens_to_the_first_ones() -> None:
    few = plan_faults("base", FLEET, 1, 100 * HOUR_S)
    many = plan_faults("base", FleetShape(32, 1, (50.0, 180.0)), 1, 100 * HOUR_S)
    alone = [fault for fault in many.faults if fault.engine < 16]
    assert [f for f in few.faults if f.kind is not FaultKind.OUTAGE] == [
        f for f in alone if f.kind is not FaultKind.OUTAGE
    ]


def test_without_faults_nothing_happens_and_every_engine_is_nominal() -> None:
    plan = plan_faults("none", FLEET, 1, 1e6)
    assert plan.faults == ()
    assert {(speed.prefill, speed.decode) for speed in plan.speeds} == {(1.0, 1.0)}


def test_rates_are_those_of_the_fault_model() -> None:
    hours = 2000.0
    faults = [
        f for seed in range(30) for f in plan_faults("base", FLEET, seed, 3600 * hours).faults
    ]
    engine_hours = hours * 16 * 30
    freezes = sum(f.kind is FaultKind.FREEZE for f in faults)
    spells = sum(f.kind is FaultKind.SPELL for f in faults)
    assert freezes / engine_hours == pytest.approx(1.0, rel=0.2)
    assert spells / engine_hours == pytest.approx(1 / 87, rel=0.3)
    ends = sum(f.kind in (FaultKind.CRASH, FaultKind.HANG) for f in faults)
    assert ends / engine_hours * 24 == pytest.approx(1 / 15 + 1 / 1000, rel=0.3)


def test_a_few_engines_have_most_faults() -> None:
    plan = plan_faults("base", FleetShape(64, 1, (50.0, 180.0)), 3, 1000 * HOUR_S)
    per_engine = sorted(
        (sum(f.engine == slot for f in plan.faults) for slot in range(64)), reverse=True
    )
    assert sum(per_engine[:13]) > 0.5 * sum(per_engine)


def test_faults_come_in_the_order_of_time() -> None:
    times = [fault.at_s for fault in plan_faults("stress", FLEET, 5, 10 * HOUR_S).faults]
    assert times == sorted(times)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="none, base, stress"):
        plan_faults("doom", FLEET, 1, 1.0)
