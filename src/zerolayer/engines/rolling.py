"""Restarts a whole fleet one engine at a time, under load: no stream ends for it."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolayer.core.engine_state import EngineState
from zerolayer.core.errors import EngineError
from zerolayer.engines.coming_up import proved, serving
from zerolayer.engines.emptying import Emptying, MoveTally
from zerolayer.engines.operations import Say
from zerolayer.engines.shown_words import without_secrets

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from zerolayer.engines.fleet import Fleet
    from zerolayer.engines.supervisor import SlotSupervisor

REASON = "roll"


@dataclass(frozen=True)
class NewArguments:
    """What engines are started with from a roll on; made and checked by the app."""

    words: tuple[str, ...]
    """All words for vLLM, in force after it."""
    config: "VllmConfig"
    changed: tuple[str, ...]
    """Names of the settings that differ."""
    recomputed: bool
    """Snapshots of engines with the old arguments mean nothing to those with the new ones."""


@dataclass
class Roll:
    """One roll of a fleet."""

    fleet: "Fleet"
    say: Say
    new: NewArguments | None
    patience_s: float
    may_wait: bool
    """With no other engine, streams wait for the restarted one instead of keeping it."""
    tally: MoveTally = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tally = MoveTally(self.fleet.driver)

    async def run(self) -> dict[str, Any]:
        """Restart every engine. Raises `EngineError` at the first that does not come back."""
        began = time.monotonic()
        if self.new is not None and self.new.recomputed:
            self.say(
                "these arguments change what a snapshot means: streams that move from an engine "
                "with the old ones are computed again, and their text may take another turn"
            )
        supervisors = list(self.fleet.supervisors)
        for supervisor in supervisors:
            try:
                await self._restart(supervisor)
            except EngineError as error:
                raise EngineError(self._stopped(error)) from error
        if self.new is not None:
            self.fleet.arguments = self.new.words
        return {
            "engines": list(self.seconds),
            "seconds_per_engine": self.seconds,
            "seconds": round(time.monotonic() - began, 2),
            "arguments": without_secrets(self.fleet.arguments),
            "changed": list(self.new.changed) if self.new is not None else [],
            **self.tally.figures(),
        }

    def _stopped(self, error: EngineError) -> str:
        done = ", ".join(self.seconds) or "none"
        kept = "their new" if self.new is not None else "their"
        return (
            f"the roll stopped: {error}. Restarted before that: {done}; they keep {kept} "
            "arguments, every other engine serves on with the old ones"
        )

    async def _restart(self, supervisor: "SlotSupervisor") -> None:
        """One engine: emptied, ended, started, proved."""
        fleet, slot, name = self.fleet, supervisor.slot, supervisor.record.name
        began = time.monotonic()
        state = fleet.driver.lives[slot].state
        if state is not EngineState.SET_ASIDE:
            await serving(supervisor)
        held_before = slot in fleet.driver.held
        fleet.driver.hold(slot)
        try:
            if state is not EngineState.SET_ASIDE:
                await self._empty(slot, name)
            await self._start_anew(supervisor)
        finally:
            if not held_before:
                await fleet.driver.let_go(slot)
        self.seconds[name] = round(time.monotonic() - began, 2)
        self.say(f"{name}: serves again after {self.seconds[name]:.1f} s")

    async def _empty(self, slot: int, name: str) -> None:
        fleet = self.fleet
        count = len(fleet.driver.on_engine[slot])
        self.say(f"{name}: moving {count} streams" if count else f"{name}: has no streams")
        if self.may_wait and len(fleet.supervisors) == 1:
            return
        others = set(range(len(fleet.supervisors))) - fleet.driver.held
        if count and not others:
            raise EngineError(f"{name} has streams and every other engine is drained; undrain one")
        emptying = Emptying(fleet, slot, REASON, self.say, self.tally)
        if not await emptying.run(self.patience_s):
            why = ", ".join(f"{count} {what}" for what, count in emptying.why_stayed().items())
            raise EngineError(f"{name} still has streams after {self.patience_s:.0f} s ({why})")
        await emptying.arrived()

    async def _start_anew(self, supervisor: "SlotSupervisor") -> None:
        """End the engine and start it, with the new arguments if there are any.

        A start that fails uses them up: the next one is with the old ones again.
        """
        fleet, slot = self.fleet, supervisor.slot
        set_aside = fleet.driver.lives[slot].state is EngineState.SET_ASIDE
        if supervisor.live is None and not set_aside:
            await serving(supervisor)  # it died by itself just now
        incarnation = fleet.driver.lives[slot].incarnation + 1
        if self.new is not None:
            fleet.trials[slot] = self.new.config
        if not set_aside:
            self.say(f"{supervisor.record.name}: restarting")
            supervisor.end("restarted by a roll")
        else:
            self.say(f"{supervisor.record.name}: starting again")
            supervisor.bring_back()
        try:
            await proved(fleet, supervisor, incarnation)
        finally:
            fleet.trials.pop(slot, None)
        if self.new is not None:
            fleet.configs[slot] = self.new.config
