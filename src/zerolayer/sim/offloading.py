"""Proactive moves in simulation: the planner of `dispatch.offload`, looked at as often as live."""

from zerolayer.dispatch.offload import OffloadPlanner, Pace, RunningStream, usual_silence_s
from zerolayer.sim.fleet import EventKind, SimFleet, run_now

LOOK_EVERY_S = 0.25


class Offloading:
    """Moves running streams before an engine is too full, through the driver's own path."""

    def __init__(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        self._driver = fleet.driver
        self._planner = OffloadPlanner()
        self._schedule()

    def _schedule(self) -> None:
        self._fleet.at(self._fleet.now + LOOK_EVERY_S, EventKind.TICK, 0, self._look)

    def _look(self) -> None:
        fleet, driver = self._fleet, self._driver
        fleet.refresh()
        now_ns, step_s = fleet.clock.monotonic_ns(), fleet.reports.decode_step_s()
        pace = Pace(step_s, step_s, usual_silence_s(driver.silences_s()))
        sources = self._planner.sources(now_ns, driver.fleet, pace)
        if sources:
            streams = [stream for slot in sources for stream in self._streams(slot)]
            for move in self._planner.plan(now_ns, driver.fleet, pace, streams):
                fleet.engines[move.source].let_go(fleet.now)
                fleet.hand_over(move.source)
                run_now(
                    driver.move_streams(move.source, [move.stream_id], move.reason, move.target)
                )
        self._schedule()

    def _streams(self, slot: int) -> list[RunningStream]:
        driver = self._driver
        owned = (driver.owned[stream_id] for stream_id in driver.on_engine[slot])
        return [
            RunningStream(
                one.stream.stream_id, slot, one.placed_tokens,
                driver.outlook.expected_output(len(one.stream.delivered)),
            )
            for one in owned
            if one.decoding
        ]  # fmt: skip
