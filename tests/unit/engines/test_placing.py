from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.stitch.noting_engines import VirtualClock
from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import EngineReport, FleetState, HardwareReport
from zerolayer.dispatch.asked import Asked, asked
from zerolayer.dispatch.choices import Admission, PlacementChoices, parse_domains
from zerolayer.dispatch.outlook import Streams
from zerolayer.engines.placing import EVERY_NS, FORECAST_NS_MAX, TIMES_IT_TOOK, Placing
from zerolayer.stitch.driver import Totals


class Driver:
    """A fleet of engines with 4 places and 1000 tokens each, as far as `Placing` looks at it."""

    def __init__(self, engines: int = 2) -> None:
        self.fleet = FleetState(engines)
        self.totals = Totals()
        self.streams: list[tuple[int, int, int, int]] = []
        self.clock, self.took_ns = VirtualClock(), [0]
        self.begun_ns: list[int] = []
        """When each forecast began; it takes the next of `took_ns`, again and again."""
        for engine in range(engines):
            self.fleet.set_standing(engine, accepts=True)
            self.fleet.set_capacity(engine, requests_max=4, kv_tokens=1000)

    def load(self, engine: int, streams: int, kv_used: float) -> None:
        for _ in range(streams):
            self.fleet.placed(engine, 10)
            self.fleet.first_token(engine, 10)
            self.streams.append((engine, 20, 10, 0))
        self.fleet.report(engine, EngineReport(kv_used, 0, 0.05, 0.001, 0.001))

    def placed_streams(self) -> Streams:
        self.begun_ns.append(self.clock.now_ns)
        self.clock.now_ns += self.took_ns[(len(self.begun_ns) - 1) % len(self.took_ns)]
        return Streams.of(self.streams)


def placing(driver: Any, **choices: Any) -> Placing:
    return Placing(PlacementChoices(**choices), driver.fleet.engines, driver.clock)


def tick(each: Placing, driver: Any, times: int) -> None:
    for number in range(times):
        each.tick(driver, (number + 1) * EVERY_NS)


def test_the_forecast_is_there_after_the_first_tick() -> None:
    driver: Any = Driver()
    driver.load(1, 2, 0.1)
    tick(placing(driver), driver, 1)
    assert driver.fleet.forecast_util[1, 0] > driver.fleet.forecast_util[0, 0]
    assert driver.fleet.forecast_mem[1, 0] > 0.0


def test_an_engine_is_hot_after_three_samples_in_a_row_and_not_before() -> None:
    driver: Any = Driver()
    driver.load(0, 4, 0.97)
    each = placing(driver)
    tick(each, driver, 2)
    assert not driver.fleet.hot.any()
    each.tick(driver, 3 * EVERY_NS - 1)  # not yet time for a sample
    assert not driver.fleet.hot.any()
    each.tick(driver, 3 * EVERY_NS)
    assert driver.fleet.hot.tolist() == [True, False]


@pytest.mark.parametrize(("busy", "hot"), [(0.99, True), (0.5, False)])
def test_the_drain_rule_takes_the_gpus_own_count_where_there_is_one(busy: float, hot: bool) -> None:
    driver: Any = Driver()
    driver.load(0, 1, 0.97)  # a quarter of its places
    driver.load(1, 4, 0.97)
    driver.fleet.hardware(0, HardwareReport(gpu_busy=busy))
    tick(placing(driver), driver, 3)
    assert driver.fleet.hot.tolist() == [hot, True]


TICK_NS = 10_000_000


@given(took_ms=st.lists(st.floats(0.0, 250.0), min_size=1, max_size=20))
def test_forecasts_take_a_twentieth_of_the_time_at_most_and_come_as_soon_as_that_allows(
    took_ms: list[float],
) -> None:
    driver: Any = Driver()
    driver.took_ns = took_ns = [int(1e6 * each) for each in took_ms]
    each = placing(driver)
    while len(driver.begun_ns) < len(took_ns) + 1:
        each.tick(driver, driver.clock.now_ns)
        driver.clock.now_ns += TICK_NS
    for took, (begun, following) in zip(took_ns, pairwise(driver.begun_ns), strict=True):
        due_ns = max(EVERY_NS, TIMES_IT_TOOK * took)
        assert due_ns <= following - begun <= due_ns + TICK_NS


def test_one_long_pause_of_the_machine_does_not_end_the_forecast_for_minutes() -> None:
    driver: Any = Driver()
    driver.took_ns = [60_000_000_000, 0]
    each = placing(driver)
    each.tick(driver, 0)
    each.tick(driver, FORECAST_NS_MAX - 1)
    assert len(driver.begun_ns) == 1
    each.tick(driver, FORECAST_NS_MAX)
    assert len(driver.begun_ns) == 2


def test_the_drain_rule_takes_its_samples_whatever_a_forecast_takes() -> None:
    driver: Any = Driver()
    driver.load(0, 4, 0.97)
    driver.took_ns = [100_000_000]
    tick(placing(driver), driver, 3)
    assert len(driver.begun_ns) == 1
    assert driver.fleet.hot.tolist() == [True, False]


def test_slots_get_the_operators_domains_also_later_ones() -> None:
    driver: Any = Driver(2)
    each = placing(driver, domains=parse_domains("1"))
    tick(each, driver, 1)
    assert driver.fleet.domain.tolist() == [1, 0]
    driver.fleet.resize(3)
    driver.fleet.set_standing(2, accepts=True)
    each.tick(driver, 9 * EVERY_NS)
    assert driver.fleet.domain.tolist() == [1, 0, 1]


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="least_requests"):
        placing(Driver(), policy="fastest")


@pytest.fixture
def wishes() -> Any:
    mine = Asked()
    token = asked.set(mine)
    yield mine
    asked.reset(token)


def full() -> Any:
    driver: Any = Driver()
    for engine in range(2):
        driver.load(engine, 6, 0.99)
    return driver


def test_a_queueing_fleet_refuses_nobody(wishes: Asked) -> None:
    driver = full()
    each = placing(driver)
    tick(each, driver, 1)
    assert each.refused_for_s(driver) is None


def test_a_full_fleet_that_may_refuse_says_when_to_come_back(wishes: Asked) -> None:
    driver = full()
    each = placing(driver, admission=Admission.REJECT)
    tick(each, driver, 1)
    wait_s = each.refused_for_s(driver)
    assert wait_s is not None
    assert wait_s >= 1.0
    assert wishes.retry_after_s == wait_s
    assert driver.totals.outcomes == {"refused": 1}


def test_a_request_that_was_let_in_once_is_not_judged_again(wishes: Asked) -> None:
    driver: Any = Driver()
    each = placing(driver, admission=Admission.REJECT)
    assert each.refused_for_s(driver) is None
    for engine in range(2):
        driver.load(engine, 6, 0.99)
    tick(each, driver, 1)
    assert each.refused_for_s(driver) is None
    wishes.admitted = False
    assert each.refused_for_s(driver) is not None


def test_a_fleet_without_engines_lets_requests_wait_for_one(wishes: Asked) -> None:
    driver = full()
    driver.fleet.accepts[:] = False
    each = placing(driver, admission=Admission.REJECT)
    assert each.refused_for_s(driver) is None


def test_vllms_question_is_asked_first_and_ours_answers_429() -> None:
    pytest.importorskip("vllm")
    from zerolayer.app.admission import install_admission

    asked_of: list[tuple[int, str | None]] = []
    llm = SimpleNamespace(check_admission=lambda n, request_id: asked_of.append((n, request_id)))
    answers: list[float | None] = [None, 2.0]
    fleet = SimpleNamespace(
        placing=SimpleNamespace(refused_for_s=lambda driver: answers.pop(0)), driver=None
    )
    install_admission(llm, fleet)  # type: ignore[arg-type]
    llm.check_admission(3)
    with pytest.raises(Exception, match="try again in 2 s") as refused:
        llm.check_admission(request_id="r")
    assert refused.value.http_status == 429  # type: ignore[attr-defined]
    assert asked_of == [(3, None), (1, "r")]
