"""The operator's orders to a fleet: checked here, carried out one at a time by `Operations`."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerolayer.core.engine_state import EngineState
from zerolayer.core.errors import ConfigError
from zerolayer.core.ids import engine_name, engine_slot
from zerolayer.core.limits import ENGINES_MAX
from zerolayer.engines.coming_up import proved
from zerolayer.engines.emptying import TARGET_PATIENCE_S, Emptying, MoveTally
from zerolayer.engines.operations import Operation, Operations, Say
from zerolayer.engines.rolling import NewArguments, Roll
from zerolayer.engines.scaling import Scale
from zerolayer.engines.shown_words import without_secrets

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

#: How long a stream that cannot be moved may keep an engine from being ended, in seconds.
PATIENCE_S = 600.0

Configure = Callable[[Sequence[str]], Awaitable[NewArguments]]
"""Words for vLLM, laid over those in force -> what engines start with. Raises `ConfigError`."""


class Steering:
    """Each method checks its order, raises `ConfigError` or `OperationBusy` and changes nothing, or
    begins an operation and returns it."""

    def __init__(self, fleet: "Fleet", operations: Operations) -> None:
        self._fleet = fleet
        self._operations = operations
        self.configure: Configure | None = None
        """Set by the app, which knows vLLM's parser; without it a roll takes no new arguments."""

    def drain(self, name: str, *, may_wait: bool = False) -> Operation:
        """Move everything off an engine and hold it."""
        slot = self._slot(name)
        self._operations.require_idle()
        if not may_wait and not self._others_accept(slot):
            raise ConfigError(
                "ENGINE", name, "no other engine takes streams now, so new ones would wait; add an "
                "engine first (zerolayer scale), or allow it with --may-wait"
            )  # fmt: skip

        async def work(say: Say) -> dict[str, Any]:
            return await self._drain(slot, say)

        return self._operations.begin("drain", f"drain {engine_name(slot)}", work)

    def undrain(self, name: str) -> Operation:
        """End the hold of an engine."""
        slot = self._slot(name)
        self._operations.require_idle()
        if slot not in self._fleet.driver.held:
            raise ConfigError("ENGINE", name, "it is not drained")

        async def work(say: Say) -> dict[str, Any]:
            await self._fleet.driver.let_go(slot)
            say(f"{engine_name(slot)} takes streams again")
            return {"engine": engine_name(slot), "state": self._state(slot).value}

        return self._operations.begin("undrain", f"undrain {engine_name(slot)}", work)

    async def roll(self, words: Sequence[str], *, may_wait: bool = False) -> Operation:
        """Restart every engine, one at a time, with these words for vLLM laid over the old ones."""
        self._operations.require_idle()
        if len(self._fleet.supervisors) == 1 and not may_wait:
            raise ConfigError(
                "roll", "1 engine", "its streams would have to wait until it is back; add an "
                "engine first (zerolayer scale 2), or allow it with --may-wait"
            )  # fmt: skip
        new = None
        if words:
            if self.configure is None:
                raise ConfigError("roll", " ".join(words), "this server takes no new arguments")
            new = await self.configure(words)

        async def work(say: Say) -> dict[str, Any]:
            return await Roll(self._fleet, say, new, PATIENCE_S, may_wait).run()

        what = f"roll with {' '.join(without_secrets(words))}" if words else "roll"
        return self._operations.begin("roll", what, work)

    def scale(self, engines: int, *, unchecked: bool = False) -> Operation:
        """Add or remove engines at the end."""
        self._operations.require_idle()
        if not 1 <= engines <= ENGINES_MAX:
            raise ConfigError("N", engines, f"give a whole number from 1 to {ENGINES_MAX}")
        self._fleet.settings.gpus.require("N", engines)

        async def work(say: Say) -> dict[str, Any]:
            return await Scale(self._fleet, engines, say, PATIENCE_S, unchecked).run()

        return self._operations.begin("scale", f"scale to {engines}", work)

    def back(self, name: str) -> Operation:
        """Try an engine again that was set aside."""
        slot = self._slot(name)
        self._operations.require_idle()
        if self._state(slot) is not EngineState.SET_ASIDE:
            raise ConfigError("ENGINE", name, f"it is {self._state(slot).value}, not set aside")

        async def work(say: Say) -> dict[str, Any]:
            return await self._bring_back(slot, say)

        return self._operations.begin("back", f"bring back {engine_name(slot)}", work)

    # -- inside -----------------------------------------------------------------------------------

    def _slot(self, name: str) -> int:
        """The slot of `e1` or `1`. Raises `ConfigError` for one that this fleet has not."""
        try:
            slot = engine_slot(f"e{name}" if name.isdigit() else name)
        except ValueError as cause:
            raise ConfigError("ENGINE", name, str(cause)) from cause
        if slot >= len(self._fleet.supervisors):
            known = ", ".join(s.record.name for s in self._fleet.supervisors)
            raise ConfigError("ENGINE", name, f"this fleet has {known}")
        return slot

    def _state(self, slot: int) -> EngineState:
        return self._fleet.driver.lives[slot].state

    def _others_accept(self, slot: int) -> bool:
        accepts = self._fleet.driver.fleet.accepts
        return any(accepts[other] for other in range(len(accepts)) if other != slot)

    async def _drain(self, slot: int, say: Say) -> dict[str, Any]:
        fleet, name, began = self._fleet, engine_name(slot), time.monotonic()
        tally = MoveTally(fleet.driver)
        say(f"{name}: moving {len(fleet.driver.on_engine[slot])} streams")
        fleet.driver.hold(slot)
        emptying = Emptying(fleet, slot, "drain", say, tally)
        empty = await emptying.run(TARGET_PATIENCE_S)
        await emptying.arrived()
        stayed = {} if empty else emptying.why_stayed()
        say(f"{name}: is held; nothing new goes there until it is undrained")
        return {
            "engine": name,
            "stayed": sum(stayed.values()),
            "why_stayed": stayed,
            "seconds": round(time.monotonic() - began, 2),
            **tally.figures(),
        }

    async def _bring_back(self, slot: int, say: Say) -> dict[str, Any]:
        fleet, supervisor = self._fleet, self._fleet.supervisors[slot]
        incarnation = fleet.driver.lives[slot].incarnation + 1
        say(f"{engine_name(slot)}: starting")
        supervisor.bring_back()
        await proved(fleet, supervisor, incarnation)
        seconds = supervisor.record.start_seconds
        say(f"{engine_name(slot)}: serves after {seconds:.1f} s")
        return {"engine": engine_name(slot), "seconds": round(seconds, 2)}
