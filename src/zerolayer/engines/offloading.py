"""Proactive offload on the live fleet: looks a few times a second, moves what the plan says."""

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from zerolayer.core.fleet_state import Floats
from zerolayer.dispatch.offload import OffloadPlanner, Pace, RunningStream, usual_silence_s
from zerolayer.stitch.driver import Owned

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

EVERY_S = 0.25


class Offloading:
    """A job of the fleet. Rests while an operator's order moves streams."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._planner = OffloadPlanner()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._fleet.operations.running is None:
                await self.look()

    async def look(self) -> int:
        """One look at the fleet; returns how many streams were moved."""
        fleet, pace = self._fleet.driver.fleet, self._pace()
        now_ns = self._fleet.clock.monotonic_ns()
        sources = self._planner.sources(now_ns, fleet, pace)
        streams = [stream for source in sources for stream in self._streams(source)]
        moved = 0
        for move in self._planner.plan(now_ns, fleet, pace, streams):
            reply = await self._fleet.driver.move_streams(
                move.source, [move.stream_id], move.reason, move.target
            )
            moved += len(reply.moved)
        return moved

    def _pace(self) -> Pace:
        fleet, watch = self._fleet.driver.fleet, self._fleet.watch
        assert watch is not None
        times = np.array([watch.decode_step_s(slot) for slot in range(fleet.engines)])
        step_s, own_s = (self._with_idle(seconds) for seconds in times.T)
        return Pace(step_s, own_s, usual_silence_s(self._fleet.driver.silences_s()))

    def _with_idle(self, step_s: Floats) -> Floats:
        """What an idle engine took when the box was quiet says nothing of now: until it has
        streams, it is taken to be as slow as the slowest that has."""
        fleet = self._fleet.driver.fleet
        decodes = fleet.running_requests > fleet.waiting_requests
        if decodes.any():
            step_s[~decodes] = step_s[decodes].max()
        return step_s

    def _streams(self, engine: int) -> list[RunningStream]:
        """Its streams that another engine could go on with at once, exactly."""
        driver = self._fleet.driver
        owned = [driver.owned[stream_id] for stream_id in driver.on_engine[engine]]
        return [
            RunningStream(
                each.stream.stream_id,
                engine,
                each.stream.context_tokens,
                driver.outlook.expected_output(len(each.stream.delivered)),
            )
            for each in owned
            if each.decoding and self._is_saved(each)
        ]

    def _is_saved(self, owned: Owned) -> bool:
        committed = self._fleet.arenas.committed_tokens(owned)
        # The newest token's KV is computed in the step after it.
        return committed is not None and committed >= owned.stream.context_tokens - 1
