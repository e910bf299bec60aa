"""Adds engines to a running fleet, or takes the last ones away once their streams have moved."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolayer.arena.runtime_dir import SHM
from zerolayer.core.errors import EngineError
from zerolayer.core.ids import engine_name
from zerolayer.engines.coming_up import proved
from zerolayer.engines.emptying import Emptying, MoveTally
from zerolayer.engines.operations import Say
from zerolayer.engines.room import Room, measure_room

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

REASON = "scale"


@dataclass
class Scale:
    """From the number of engines now to another one."""

    fleet: "Fleet"
    engines: int
    say: Say
    patience_s: float
    unchecked: bool = False
    """Start them even if they do not seem to fit."""

    async def run(self) -> dict[str, Any]:
        """Add or remove one engine after the other. Raises `EngineError` and stops at the first
        that cannot be; what was done before stays."""
        began, tally = time.monotonic(), MoveTally(self.fleet.driver)
        before = len(self.fleet.supervisors)
        if self.engines > before and not self.unchecked:
            await self._require_room(self.engines - before)
        while len(self.fleet.supervisors) < self.engines:
            await self._add()
        while len(self.fleet.supervisors) > self.engines:
            await self._remove(tally)
        return {
            "engines_before": before,
            "engines": len(self.fleet.supervisors),
            "seconds": round(time.monotonic() - began, 2),
            **tally.figures(),
        }

    async def _require_room(self, more: int) -> None:
        room = await room_of(self.fleet)
        lacking = room.lacks(more)
        if lacking:
            raise EngineError(
                f"{'; '.join(lacking)}. Start fewer, lower --snapshot-gib or the engines' KV "
                "cache, or order it all the same with --force"
            )

    async def _add(self) -> None:
        slot = len(self.fleet.supervisors)
        self.say(f"{engine_name(slot)}: starting")
        supervisor = self.fleet.add_slot()
        incarnation = self.fleet.driver.lives[slot].incarnation
        try:
            await proved(self.fleet, supervisor, incarnation)
        except EngineError as error:
            await self.fleet.remove_slot("it could not be started")
            raise EngineError(f"the fleet stays at {slot} engines: {error}") from error
        self.say(f"{engine_name(slot)}: serves after {supervisor.record.start_seconds:.1f} s")

    async def _remove(self, tally: MoveTally) -> None:
        fleet, slot = self.fleet, len(self.fleet.supervisors) - 1
        name = engine_name(slot)
        self.say(f"{name}: moving {len(fleet.driver.on_engine[slot])} streams")
        fleet.driver.hold(slot)
        emptying = Emptying(fleet, slot, REASON, self.say, tally)
        if not await emptying.run(self.patience_s):
            await fleet.driver.let_go(slot)
            why = ", ".join(f"{count} {what}" for what, count in emptying.why_stayed().items())
            raise EngineError(
                f"{name} stays: it still has streams after {self.patience_s:.0f} s ({why})"
            )
        await emptying.arrived()
        await fleet.remove_slot("the fleet was made smaller")
        self.say(f"{name}: removed")


async def room_of(fleet: "Fleet") -> Room:
    """What is free, and what one more engine takes."""
    live = [s.live.launched for s in fleet.supervisors if s.live is not None]
    pids = [launched.pids for launched in live]
    arenas = [
        path
        for slot, life in enumerate(fleet.driver.lives)
        for path in fleet.runtime.path.glob(f"arena-{engine_name(slot)}-{life.incarnation}-r*.kv")
    ]
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, measure_room, pids, arenas, SHM)
