"""Laws of the operator's orders: drain, roll, scale, back."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.engines.fake_fleet import FakeFleet
from zerolayer.core.engine_state import EngineEvent, EngineState
from zerolayer.core.errors import ConfigError
from zerolayer.engines import coming_up, emptying, scaling
from zerolayer.engines.gpus import Gpus
from zerolayer.engines.operations import LINES_MAX, OperationBusy
from zerolayer.engines.rolling import NewArguments
from zerolayer.engines.room import Room


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(coming_up, "LOOK_EVERY_S", 0.0)


async def fleet_with_streams(engines: int, streams: int) -> FakeFleet:
    fleet = FakeFleet(engines)
    await fleet.all_up()
    for number in range(streams):
        await fleet.driver.add(f"s{number}", "request", 5, by_prefill=False)
        home = fleet.driver.owned[f"s{number}"].stream.engine
        assert home is not None
        fleet.bench.emit(home, request_id=f"s{number}@0", new_token_ids=[1])
    return fleet


def states(fleet: FakeFleet) -> list[str]:
    return [life.state.value for life in fleet.driver.lives]


async def new_arguments(words: Sequence[str]) -> NewArguments:
    if "--bad" in words:
        raise ConfigError("vLLM arguments", "unrecognized: --bad", "give others")
    config: Any = "new"
    return NewArguments(tuple(words), config, ("max_num_seqs",), recomputed=False)


async def test_a_drained_engine_is_empty_and_held_until_it_is_undrained() -> None:
    fleet = await fleet_with_streams(2, 6)
    done = await fleet.carried_out(lambda: fleet.steering.drain("e1"))
    assert (done.state, done.error) == ("done", "")
    assert done.result is not None
    assert (done.result["moved"], done.result["stayed"]) == (3, 0)
    assert done.result["from_snapshot"] == 3
    assert done.result["worst_gap_ms"] > 0
    assert states(fleet) == ["ready", "draining"]
    assert len(fleet.driver.on_engine[0]) == 6
    await fleet.carried_out(lambda: fleet.steering.undrain("1"))
    assert states(fleet) == ["ready", "ready"]
    with pytest.raises(ConfigError, match="not drained"):
        fleet.steering.undrain("e1")


async def test_the_only_engine_is_drained_only_if_streams_may_wait() -> None:
    fleet = await fleet_with_streams(1, 2)
    with pytest.raises(ConfigError, match="--may-wait"):
        fleet.steering.drain("e0")
    assert states(fleet) == ["ready"]


async def test_streams_that_no_engine_takes_stay_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(1, 2)
    monkeypatch.setattr("zerolayer.engines.steering.TARGET_PATIENCE_S", 0.0)
    done = await fleet.carried_out(lambda: fleet.steering.drain("e0", may_wait=True))
    assert done.result is not None
    assert (done.result["moved"], done.result["stayed"]) == (0, 2)
    assert done.result["why_stayed"] == {"no other engine takes streams now": 2}
    assert len(fleet.driver.on_engine[0]) == 2
    assert fleet.driver.owned["s0"].stream.epoch == 0


async def test_a_stream_whose_snapshot_is_behind_is_left_until_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(2, 2)
    fleet.arenas.behind = {"s0", "s1"}
    looks: list[int] = []

    def committed(owned: Any) -> int:
        looks.append(1)
        return 0 if len(looks) < 5 else 100

    monkeypatch.setattr(fleet.arenas, "committed_tokens", committed)
    done = await fleet.carried_out(lambda: fleet.steering.drain("e0"))
    assert done.result is not None
    assert done.result["moved"] == 1
    assert len(looks) == 5


async def test_a_roll_restarts_every_engine_and_no_stream_ends() -> None:
    fleet = await fleet_with_streams(3, 9)
    operation = await rolled(fleet, ())
    assert operation.error == ""
    assert operation.result is not None
    assert list(operation.result["seconds_per_engine"]) == ["e0", "e1", "e2"]
    assert [life.incarnation for life in fleet.driver.lives] == [2, 2, 2]
    assert states(fleet) == ["ready"] * 3
    assert len(fleet.driver.owned) == 9
    assert not fleet.bench.failed
    assert not fleet.driver.waiting
    assert all(owned.moves == 0 for owned in fleet.driver.owned.values())


async def rolled(fleet: FakeFleet, words: Sequence[str], *, may_wait: bool = False) -> Any:
    fleet.steering.configure = new_arguments
    operation = await fleet.steering.roll(words, may_wait=may_wait)
    return await fleet.carried_out(lambda: operation)


async def test_an_engine_keeps_its_new_arguments_over_later_restarts() -> None:
    fleet = await fleet_with_streams(2, 2)
    operation = await rolled(fleet, ("--max-num-seqs", "8"))
    assert operation.error == ""
    assert fleet.arguments == ("--max-num-seqs", "8")
    assert fleet.configs == ["new", "new"]
    assert [s.started_with for s in fleet.supervisors] == [["old", "new"]] * 2
    assert fleet.trials == {}


async def test_a_bad_argument_refuses_the_roll_and_changes_nothing() -> None:
    fleet = await fleet_with_streams(2, 2)
    fleet.steering.configure = new_arguments
    with pytest.raises(ConfigError, match="--bad"):
        await fleet.steering.roll(("--bad",))
    assert fleet.operations.newest is None
    assert [life.incarnation for life in fleet.driver.lives] == [1, 1]


async def test_a_roll_stops_at_an_engine_that_stays_away_which_gets_its_old_arguments() -> None:
    fleet = await fleet_with_streams(3, 6)
    fleet.supervisors[1].fails = 1
    operation = await rolled(fleet, ("--max-num-seqs", "8"))
    assert operation.state == "failed"
    assert "e1" in operation.error
    assert "no such memory" in operation.error
    assert "Restarted before that: e0" in operation.error
    while fleet.tasks:
        await next(iter(fleet.tasks))
    assert fleet.supervisors[1].started_with == ["old", "new", "old"]
    assert fleet.configs == ["new", "old", "old"]
    assert fleet.arguments == ()
    assert states(fleet) == ["ready"] * 3
    assert len(fleet.driver.owned) == 6


async def test_a_roll_waits_for_a_stream_that_cannot_move_and_stops_rather_than_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(2, 2)
    monkeypatch.setattr("zerolayer.engines.steering.PATIENCE_S", 0.0)
    monkeypatch.setattr(
        fleet.driver, "_elsewhere", lambda *_: (None, "its input is a live session")
    )
    operation = await rolled(fleet, ())
    assert "live session" in operation.error
    assert [life.incarnation for life in fleet.driver.lives] == [1, 1]
    assert states(fleet) == ["ready", "ready"]
    assert len(fleet.driver.owned) == 2


async def test_the_only_engine_is_rolled_while_its_streams_wait_if_they_may() -> None:
    fleet = await fleet_with_streams(1, 2)
    with pytest.raises(ConfigError, match="--may-wait"):
        await fleet.steering.roll(())
    operation = await rolled(fleet, (), may_wait=True)
    assert operation.error == ""
    assert len(fleet.driver.on_engine[0]) == 2
    assert not fleet.bench.failed


async def test_a_roll_leaves_an_engine_held_that_was_held_before() -> None:
    fleet = await fleet_with_streams(3, 2)
    await fleet.carried_out(lambda: fleet.steering.drain("e1"))
    await rolled(fleet, ())
    assert fleet.supervisors[1].started_with == ["old", "old"]
    assert states(fleet) == ["ready", "draining", "ready"]


async def test_a_roll_does_not_wait_for_engines_that_the_operator_drained() -> None:
    fleet = await fleet_with_streams(2, 2)
    await fleet.carried_out(lambda: fleet.steering.drain("e1"))
    operation = await rolled(fleet, ())
    assert "undrain one" in operation.error
    assert states(fleet) == ["ready", "draining"]


async def test_scaling_up_adds_engines_and_scaling_down_moves_their_streams_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(1, 2)
    monkeypatch.setattr(scaling, "room_of", room(1 << 40))
    done = await fleet.carried_out(lambda: fleet.steering.scale(3))
    assert (done.error, states(fleet)) == ("", ["ready"] * 3)
    for number in range(4):
        await fleet.driver.add(f"t{number}", "request", 5, by_prefill=False)
    assert fleet.driver.on_engine[2]
    done = await fleet.carried_out(lambda: fleet.steering.scale(1))
    assert (done.error, states(fleet)) == ("", ["ready"])
    assert done.result is not None
    assert (done.result["engines_before"], done.result["engines"]) == (3, 1)
    assert len(fleet.driver.on_engine[0]) == 6
    with pytest.raises(ConfigError):
        fleet.steering.scale(0)


def room(free: int) -> Any:
    async def measured(_fleet: Any) -> Room:
        return Room(ram_free=free, ram_each=2 << 30, shm_free=free, shm_each=1 << 30)

    return measured


async def test_engines_that_do_not_fit_are_refused_with_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(1, 0)
    monkeypatch.setattr(scaling, "room_of", room(3 << 30))
    done = await fleet.carried_out(lambda: fleet.steering.scale(3))
    assert "2 more engines need 4.0 GiB of RAM and 3.0 GiB are free" in done.error
    assert "/dev/shm" not in done.error
    assert len(fleet.supervisors) == 1
    done = await fleet.carried_out(lambda: fleet.steering.scale(3, unchecked=True))
    assert (done.error, len(fleet.supervisors)) == ("", 3)


async def test_engines_beyond_the_gpus_are_refused_even_unchecked_and_nothing_changes() -> None:
    fleet = await fleet_with_streams(2, 2)
    fleet.settings.gpus = Gpus(("0", "1"), each=1)
    with pytest.raises(ConfigError, match=r"has 2 visible GPUs .* --engines-per-gpu 2"):
        fleet.steering.scale(3, unchecked=True)
    assert fleet.operations.newest is None
    assert states(fleet) == ["ready", "ready"]


async def test_an_engine_that_does_not_start_is_taken_away_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_with_streams(2, 2)
    monkeypatch.setattr(scaling, "room_of", room(1 << 40))
    fleet.next_fails = 1
    done = await fleet.carried_out(lambda: fleet.steering.scale(3))
    assert "stays at 2 engines" in done.error
    assert "no such memory" in done.error
    assert states(fleet) == ["ready", "ready"]


async def test_an_engine_that_was_set_aside_is_brought_back() -> None:
    fleet = await fleet_with_streams(2, 0)
    with pytest.raises(ConfigError, match="not set aside"):
        fleet.steering.back("e1")
    fleet.supervisors[1].live = None
    fleet.driver.engine_gone(1)
    fleet.driver.apply(1, EngineEvent.GAVE_UP)
    done = await fleet.carried_out(lambda: fleet.steering.back("e1"))
    assert done.error == ""
    assert fleet.driver.lives[1].state is EngineState.READY


async def test_one_order_at_a_time_and_each_names_an_engine_that_is_there() -> None:
    fleet = await fleet_with_streams(2, 0)
    fleet.steering.drain("e0")
    with pytest.raises(OperationBusy, match="drain e0 is running"):
        fleet.steering.drain("e1")
    with pytest.raises(OperationBusy, match="drain e0 is running"):
        fleet.steering.scale(3)
    with pytest.raises(ConfigError, match="e0, e1"):
        fleet.steering.drain("e7")
    with pytest.raises(ConfigError):
        fleet.steering.drain("west")


async def test_a_bug_in_an_order_ends_the_order_alone() -> None:
    fleet = await fleet_with_streams(1, 0)

    async def bug(say: Any) -> dict[str, Any]:
        for number in range(LINES_MAX + 5):
            say(str(number))
        raise KeyError("left")

    done = await fleet.carried_out(lambda: fleet.operations.begin("roll", "roll", bug))
    assert done.state == "failed"
    assert "KeyError" in done.error
    assert len(done.lines) == LINES_MAX
    await fleet.carried_out(lambda: fleet.steering.drain("e0", may_wait=True))
