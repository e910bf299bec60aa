"""Laws of proactive offload, over fleets and streams that hypothesis makes up."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.offload import (
    SILENCE_S,
    OffloadPlanner,
    OffloadSettings,
    Pace,
    PlannedMove,
    RunningStream,
    usual_silence_s,
)
from zerolayer.dispatch.request_cost import decode_places

SECOND = 10**9
SETTINGS = OffloadSettings(moves_per_minute_max=6, moves_per_plan_max=3)


@dataclass
class Floor:
    """A fleet whose forecast follows its streams: utilisation 1/16 each, memory by tokens."""

    fleet: FleetState
    streams: dict[str, RunningStream]
    planner: OffloadPlanner = field(default_factory=lambda: OffloadPlanner(SETTINGS))
    log: list[tuple[int, PlannedMove]] = field(default_factory=list)
    silence_s: float = SILENCE_S
    own: float = 1.0
    """Share of a step that is not a wait for cores."""

    def refresh(self) -> None:
        self.fleet.running_requests[:] = self.fleet.running_tokens[:] = 0.0
        for stream in self.streams.values():
            self.fleet.running_requests[stream.engine] += 1
            self.fleet.running_tokens[stream.engine] += stream.context_tokens
        self.fleet.forecast_util[:] = 0.0
        self.fleet.forecast_mem[:] = 0.0
        places = decode_places(self.fleet)
        for stream in self.streams.values():
            self.fleet.forecast_util[stream.engine] += 1.0 / places[stream.engine]
            kv = self.fleet.kv_tokens[stream.engine]
            self.fleet.forecast_mem[stream.engine] += stream.context_tokens / kv

    def step(self, now_ns: int) -> list[PlannedMove]:
        self.refresh()
        step_s = self.fleet.expected_step_s
        pace = Pace(step_s, self.own * step_s, self.silence_s)
        sources = self.planner.sources(now_ns, self.fleet, pace)
        streams = [s for s in self.streams.values() if s.engine in sources]
        moves = self.planner.plan(now_ns, self.fleet, pace, streams)
        for move in moves:
            old = self.streams[move.stream_id]
            assert old.engine == move.source
            self.streams[move.stream_id] = RunningStream(
                old.stream_id, move.target, old.context_tokens, old.rest_tokens
            )
            self.log.append((now_ns, move))
        self.refresh()
        return moves


@st.composite
def floors(draw: st.DrawFn) -> Floor:
    engines = draw(st.integers(1, 5))
    fleet = FleetState(engines)
    fleet.requests_max[:] = draw(st.sampled_from([8.0, 16.0]))
    fleet.kv_tokens[:] = draw(st.sampled_from([8_000.0, 50_000.0, np.inf]))
    for engine in range(engines):
        fleet.set_standing(
            engine,
            accepts=draw(st.booleans() | st.just(True)),
            suspect=draw(st.integers(0, 9)) == 9,
        )
        fleet.set_domain(engine, draw(st.sampled_from([0, 0, 0, 1])))
        fleet.expected_step_s[engine] = draw(st.sampled_from([0.05, 0.06, 0.2]))
    count = draw(st.integers(0, 40))
    streams = {}
    for number in range(count):
        streams[f"s{number}"] = RunningStream(
            f"s{number}",
            draw(st.integers(0, engines - 1)),
            draw(st.integers(1, 3_000)),
            float(draw(st.integers(0, 500))),
        )
    return Floor(fleet, streams)


def run(floor: Floor, seconds: float = 30.0, every_s: float = 0.5) -> None:
    for tick in range(int(seconds / every_s)):
        floor.step(SECOND + int(tick * every_s * SECOND))


@settings(max_examples=40)
@given(floors())
def test_no_minute_sees_more_moves_than_the_budget(floor: Floor) -> None:
    run(floor, 70.0, every_s=1.0)
    times = [at for at, _ in floor.log]
    for at in times:
        assert sum(at <= other < at + 60 * SECOND for other in times) <= 6


@settings(max_examples=40)
@given(floors())
def test_nothing_moves_to_an_engine_that_it_would_lift_over_the_limit(floor: Floor) -> None:
    for tick in range(20):
        for move in floor.step(SECOND + tick * SECOND // 4):
            assert floor.fleet.accepts[move.target]
            assert not floor.fleet.suspect[move.target]
            assert floor.fleet.domain[move.target] == floor.fleet.domain[move.source]
            assert floor.fleet.forecast_util[move.target].max() <= SETTINGS.limit + 1e-9
            assert floor.fleet.forecast_mem[move.target].max() <= SETTINGS.limit + 1e-9


@settings(max_examples=40)
@given(floors())
def test_a_moved_stream_stays_and_a_pair_does_not_swap_within_the_hold(floor: Floor) -> None:
    run(floor)
    hold_ns = int(SETTINGS.hold_s * 1e9)
    for number, (at, move) in enumerate(floor.log):
        for later, other in floor.log[number + 1 :]:
            if later - at < hold_ns:
                assert other.stream_id != move.stream_id
                assert (other.source, other.target) != (move.target, move.source)


@settings(max_examples=40)
@given(floors())
def test_moves_off_a_hot_engine_never_raise_the_predicted_maximum(floor: Floor) -> None:
    floor.fleet.expected_step_s[:] = 0.05  # nobody is slow
    for tick in range(20):
        floor.refresh()
        before = _peak(floor)
        moves = floor.step(SECOND + tick * SECOND // 4)
        assert _peak(floor) <= before + 1e-9
        for move in moves:
            assert move.reason == "offload: hot"


def _peak(floor: Floor) -> float:
    return max(float(floor.fleet.forecast_util.max()), float(floor.fleet.forecast_mem.max()))


@settings(max_examples=40)
@given(floors())
def test_the_same_fleet_gets_the_same_plan(floor: Floor) -> None:
    twin = Floor(floor.fleet, dict(floor.streams))
    run(floor, 5.0)
    run(twin, 5.0)
    assert floor.log == twin.log


def make(engines: int = 2, on_first: int = 16) -> Floor:
    fleet = FleetState(engines)
    fleet.requests_max[:] = 16.0
    for engine in range(engines):
        fleet.set_standing(engine, accepts=True)
    streams = {f"s{n}": RunningStream(f"s{n}", 0, 100 + 100 * n, 200.0) for n in range(on_first)}
    return Floor(fleet, streams)


def test_a_hot_engine_gives_its_cheapest_streams_away_until_it_is_below_the_limit() -> None:
    floor = make()
    moves = floor.step(SECOND)
    assert [m.stream_id for m in moves] == ["s0", "s1"]  # 16/16 -> 14/16, below 0.95 - 0.05
    assert {(m.source, m.target, m.reason) for m in moves} == {(0, 1, "offload: hot")}
    assert floor.step(2 * SECOND) == []


def test_a_stream_with_more_to_come_is_worth_more_at_the_same_cost() -> None:
    floor = make()
    floor.streams["s1"] = RunningStream("s1", 0, 100, 400.0)
    assert floor.step(SECOND)[0].stream_id == "s1"


def test_a_slow_engine_gives_streams_away_only_after_it_was_slow_for_a_while() -> None:
    floor = make(on_first=3)
    floor.fleet.expected_step_s[:] = (0.2, 0.05)
    assert floor.step(SECOND) == []
    assert floor.step(2 * SECOND) == []
    assert {m.reason for m in floor.step(3 * SECOND)} == {"offload: slow"}
    assert {s.engine for s in floor.streams.values()} == {1}


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_what_makes_all_engines_slower_together_moves_nobody(factor: float) -> None:
    floor = make(engines=3, on_first=3)
    floor.fleet.expected_step_s[:] = (0.06, 0.05, 0.05)
    for tick in range(40):
        if tick == 8:
            floor.fleet.expected_step_s *= factor
        assert floor.step(SECOND + tick * SECOND // 4) == []


@pytest.mark.parametrize(("own", "moves"), [(1.0, True), (0.8, True), (0.3, False)])
def test_an_engine_is_slow_by_what_it_takes_itself_against_what_streams_see_elsewhere(
    own: float, moves: bool
) -> None:
    floor = make(on_first=3)
    floor.own = own
    floor.fleet.expected_step_s[:] = (0.15, 0.05)
    for tick in range(12):
        floor.step(SECOND + tick * SECOND // 4)
    assert bool(floor.log) is moves


def test_one_engine_that_is_faster_than_all_makes_none_of_them_slow() -> None:
    floor = make(engines=4, on_first=3)
    floor.fleet.expected_step_s[:] = (0.1, 0.1, 0.1, 0.03)
    for tick in range(40):
        assert floor.step(SECOND + tick * SECOND // 4) == []


@pytest.mark.parametrize(("silence_s", "moves"), [(0.1, True), (5.0, False)])
def test_a_stream_that_would_not_gain_what_a_move_costs_stays(
    silence_s: float, moves: bool
) -> None:
    floor = make(on_first=3)
    floor.silence_s = silence_s
    floor.streams = {name: replace(s, rest_tokens=40.0) for name, s in floor.streams.items()}
    floor.fleet.expected_step_s[:] = (0.2, 0.05)  # 8 s to its end here, 6 s of them to be gained
    for tick in range(12):
        floor.step(SECOND + tick * SECOND // 4)
    assert bool(floor.log) is moves


@pytest.mark.parametrize(("step_s", "moves"), [(0.002, False), (0.02, True)])
def test_a_stream_that_ends_before_its_move_would_be_over_leaves_no_hot_engine(
    step_s: float, moves: bool
) -> None:
    floor = make()
    floor.fleet.expected_step_s[:] = step_s
    floor.streams = {name: replace(s, rest_tokens=50.0) for name, s in floor.streams.items()}
    assert bool(floor.step(SECOND)) is moves  # ends in 0.1 s or 1 s; a move takes 0.3 s


def test_the_silence_of_a_move_is_the_median_of_the_last_ones() -> None:
    assert usual_silence_s([]) == SILENCE_S
    assert usual_silence_s([9.0] * 20 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]) == 0.5


def test_a_spell_that_ends_is_no_reason() -> None:
    floor = make(on_first=3)
    for tick, seconds in enumerate((0.2, 0.05, 0.2, 0.05, 0.2)):
        floor.fleet.expected_step_s[0] = seconds
        assert floor.step(SECOND + tick * SECOND * 3 // 4) == []


@pytest.mark.parametrize("rest", [1.0, 15.0])
def test_a_stream_that_is_about_to_end_is_left_alone(rest: float) -> None:
    floor = make()
    floor.streams = {
        name: RunningStream(name, 0, s.context_tokens, rest) for name, s in floor.streams.items()
    }
    assert floor.step(SECOND) == []


def test_where_every_engine_is_full_nothing_moves() -> None:
    floor = make()
    floor.streams |= {f"t{n}": RunningStream(f"t{n}", 1, 100, 200.0) for n in range(16)}
    assert floor.step(SECOND) == []


def test_an_engine_that_takes_nothing_new_gets_no_stream() -> None:
    floor = make()
    floor.fleet.set_standing(1, accepts=False)
    assert floor.step(SECOND) == []
    floor.fleet.set_standing(1, accepts=True, suspect=True)
    assert floor.step(SECOND) == []
    floor.fleet.set_standing(1, accepts=True)
    floor.fleet.hot[1] = True
    assert floor.step(SECOND) == []
