"""The live side of offload: what it looks at, and what it leaves alone."""

from typing import Any

import pytest

from tests.unit.engines.fake_fleet import FakeFleet
from zerolayer.dispatch.offload import OffloadPlanner, OffloadSettings
from zerolayer.engines.offloading import Offloading

SECOND = 10**9


class FakeWatch:
    """Step times as the watch has learned them."""

    own = 1.0
    """Share of a step that is not a wait for cores."""

    def __init__(self, *step_s: float) -> None:
        self._step_s = step_s

    def decode_step_s(self, slot: int) -> tuple[float, float]:
        return self._step_s[slot], self.own * self._step_s[slot]


async def offloading(*step_s: float, beside: int = 1) -> tuple[FakeFleet, Offloading]:
    """A fleet with 4 streams on e0, `beside` on e1, and these step times."""
    fleet: Any = FakeFleet(2)
    await fleet.all_up()
    fleet.driver.hold(1)
    for number in range(4):
        await fleet.driver.add(f"s{number}", "request", 5, by_prefill=False)
        fleet.bench.emit(0, request_id=f"s{number}@0", new_token_ids=[1])
    await fleet.driver.let_go(1)
    fleet.driver.hold(0)
    for number in range(beside):
        await fleet.driver.add(f"t{number}", "request", 5, by_prefill=False)
        fleet.bench.emit(1, request_id=f"t{number}@0", new_token_ids=[1])
    await fleet.driver.let_go(0)
    fleet.watch, fleet.clock = FakeWatch(*step_s), fleet.bench.clock
    job = Offloading(fleet)
    job._planner = OffloadPlanner(OffloadSettings(slow_for_s=0.0, moves_per_plan_max=2))
    return fleet, job


async def test_streams_leave_an_engine_that_is_much_slower_than_another() -> None:
    fleet, job = await offloading(0.2, 0.05)
    assert await job.look() == 2
    assert await job.look() == 2
    assert [len(streams) for streams in fleet.driver.on_engine] == [0, 5]
    fleet.give_tokens()
    assert {record.reason for record in fleet.driver.recent_moves} == {"offload: slow"}
    assert fleet.driver.totals.moves_on_purpose == 4


async def test_an_engine_that_is_slow_for_want_of_cores_keeps_its_streams() -> None:
    _fleet, job = await offloading(0.2, 0.05)
    job._fleet.watch.own = 0.3  # type: ignore[union-attr]
    assert await job.look() == 0


async def test_an_idle_engine_is_not_known_to_be_faster() -> None:
    _fleet, job = await offloading(0.2, 0.05, beside=0)
    assert await job.look() == 0


async def test_equal_engines_keep_their_streams() -> None:
    _fleet, job = await offloading(0.06, 0.05)
    assert await job.look() == 0


async def test_a_stream_whose_snapshot_is_behind_or_missing_is_not_moved_for_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, job = await offloading(0.2, 0.05)
    fleet.arenas.behind = {"s0", "s1", "s2"}
    assert await job.look() == 1
    monkeypatch.setattr(fleet.arenas, "committed_tokens", lambda owned: None)
    assert await job.look() == 0


async def test_before_the_first_token_there_is_nothing_to_move() -> None:
    fleet, job = await offloading(0.2, 0.05)
    for number in range(4):
        await fleet.driver.move_streams(0, [f"s{number}"], "test", 1)
        await fleet.driver.move_streams(1, [f"s{number}"], "test", 0)
    assert [len(streams) for streams in fleet.driver.on_engine] == [4, 1]
    assert await job.look() == 0
