"""What happens when an engine fails: to the engine, and to its streams by what the system does.

| continuation | crash seen after | freeze | hang | streams then |
|---|---|---|---|---|
| `snapshot` (ours) | 30 ms | 120 ms | 600 ms | go on elsewhere from their pages |
| `reprefill` (NVIDIA Dynamo) | 10 ms | 1 s | 1 s | go on elsewhere, computed again |
| `retry` (the other routers) | 10 ms | - | - | break; clients ask again from the start |

Ours are measured on the CPU fleet (`docs/figures.md`: death noticed after 18-22 ms, freeze after
105-111 ms) with room for a busy box; 600 ms for a hang that still uses its cores is the adaptive
bound of `stitch.stall` passed three times. Dynamo has its migration and its timer on, which is not
its default, and the timer's smallest value (as run: worst gap 56-105 ms after a kill, 1.0-1.08 s
after a freeze). Under `retry` a frozen engine keeps its streams until it wakes, a hanging one until
a progress check of 30 s to 10 min ends it. Ours ends it 30 s after it was found
(`restart_after_s`), Dynamo's by the same check as the others.

An idle engine owes no work: that it is frozen or hangs is seen when it gets some.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zerolayer.core.engine_state import EngineEvent, EngineState
from zerolayer.core.errors import ConfigError
from zerolayer.core.outcome import Outcome
from zerolayer.sim.faults import EngineSpeed, Fault, FaultKind
from zerolayer.sim.fleet import EventKind, SimFleet, run_now

PROVE_S = 0.25
"""From waking up until an engine has proved itself and gets new streams (`engines.watch`)."""
LOOK_AGAIN_S = 0.1
"""How often an engine that owes nothing is looked at."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a system does about failures; seconds, None for never."""

    crash_s: float
    freeze_s: float | None
    hang_s: float | None
    end_hung_s: float | None
    """From finding a hang until the engine is ended; None: until the fault's own progress check."""


REACTIONS = {
    "snapshot": Reaction(0.030, 0.120, 0.600, 30.0),
    "reprefill": Reaction(0.010, 1.0, 1.0, None),
    "retry": Reaction(0.010, None, None, None),
}
DIE_TOGETHER = frozenset({"vllm_dp"})
"""Policies of systems in which the death of one engine ends the whole server: vLLM's own data
parallel mode (as run)."""


def reaction_of(continuation: str) -> Reaction:
    """What is done under this name. Raises ConfigError for another."""
    reaction = REACTIONS.get(continuation)
    if reaction is None:
        raise ConfigError("continuation", continuation, f"give one of {', '.join(REACTIONS)}")
    return reaction


class Recovery:
    """Lets the faults of a plan happen, and brings streams and engines back."""

    def __init__(self, fleet: SimFleet, continuation: str, *, together: bool) -> None:
        self._fleet = fleet
        self._driver = fleet.driver
        self._reaction = reaction_of(continuation)
        self._breaks = continuation == "retry"
        self._together = together
        plan = fleet.setup.plan
        engines = range(fleet.setup.engines)
        self._life = [1 for _ in engines]
        self._spells: list[list[float]] = [[] for _ in engines]
        self._slow_start = list(plan.slow_starts)
        self.happened: list[Fault] = []
        for slot in engines:
            self._set_speed(slot)
        self._next = 0
        self._schedule_next()

    # -- faults come ------------------------------------------------------------------------------

    def _schedule_next(self) -> None:
        faults = self._fleet.setup.plan.faults
        if self._next < len(faults):
            fault = faults[self._next]
            self._next += 1
            self._fleet.at(fault.at_s, EventKind.FAULT, fault.engine, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        self.happened.append(fault)
        self._fleet.log.note(self._fleet.now, b"x", fault.engine, -1)
        self._schedule_next()
        if fault.kind is FaultKind.SPELL:
            self._slow_down(fault)
        elif not self._fleet.engines[fault.engine].dead:
            if fault.kind is FaultKind.FREEZE:
                self._freeze(fault)
            elif fault.kind is FaultKind.HANG:
                self._hang(fault)
            else:
                self._crash(fault)

    def _slow_down(self, fault: Fault) -> None:
        slot = fault.engine
        self._spells[slot].append(fault.factor)
        self._set_speed(slot)

        def over() -> None:
            self._spells[slot].remove(fault.factor)
            self._set_speed(slot)

        self._after(fault.seconds, slot, over)

    def _set_speed(self, slot: int) -> None:
        speed: EngineSpeed = self._fleet.setup.plan.speeds[slot]
        prefill, decode = speed.prefill, speed.decode * self._slow_start[slot]
        for factor in self._spells[slot]:
            prefill, decode = prefill * factor, decode * factor
        engine = self._fleet.engines[slot]
        engine.set_speed(self._fleet.now, prefill, decode)
        self._fleet.follow(engine)

    def _freeze(self, fault: Fault) -> None:
        slot, life = fault.engine, self._life[fault.engine]
        engine = self._fleet.engines[slot]
        engine.freeze(self._fleet.now, fault.seconds)
        self._fleet.follow(engine)
        self._after(fault.seconds, slot, lambda: self._wake(slot, life))
        if self._reaction.freeze_s is not None and self._reaction.freeze_s < fault.seconds:
            self._after(self._reaction.freeze_s, slot, lambda: self._find_still(slot, life, None))

    def _hang(self, fault: Fault) -> None:
        slot, life = fault.engine, self._life[fault.engine]
        engine = self._fleet.engines[slot]
        engine.freeze(self._fleet.now, float("inf"))
        self._fleet.follow(engine)
        if self._reaction.hang_s is not None:
            self._after(self._reaction.hang_s, slot, lambda: self._find_still(slot, life, fault))
        if self._reaction.end_hung_s is None:
            self._after(fault.found_s, slot, lambda: self._end_hung(life, fault))

    def _wake(self, slot: int, life: int) -> None:
        """A freeze is over; the engine goes on, and is asked for proof if it had been given up."""
        engine = self._fleet.engines[slot]
        if self._life[slot] != life or self._fleet.now < engine.frozen_until:
            return
        engine.start(self._fleet.now)
        self._fleet.follow(engine)
        if self._driver.lives[slot].state is EngineState.STALLED:
            self._after(PROVE_S, slot, lambda: self._prove(slot, life))

    def _prove(self, slot: int, life: int) -> None:
        engine = self._fleet.engines[slot]
        if self._life[slot] != life or self._fleet.now < engine.frozen_until:
            return
        if self._driver.lives[slot].state is EngineState.STALLED:
            self._driver.apply(slot, EngineEvent.CLEARED)
            self._fleet.refresh()
            run_now(self._driver.place_waiting())

    def _find_still(self, slot: int, life: int, hang: Fault | None) -> None:
        """The engine has made no progress for the time after which that is a verdict."""
        fleet, driver = self._fleet, self._driver
        if self._life[slot] != life or fleet.now >= fleet.engines[slot].frozen_until:
            return
        if hang is not None and driver.lives[slot].state is EngineState.STALLED:
            self._end_later(life, hang)  # it hung while it was still to prove itself
            return
        if not driver.on_engine[slot]:
            self._after(LOOK_AGAIN_S, slot, lambda: self._find_still(slot, life, hang))
            return
        if not driver.lives[slot].can(EngineEvent.STALLED):
            return
        fleet.engines[slot].let_go(fleet.now)
        fleet.hand_over(slot)
        driver.apply(slot, EngineEvent.STALLED)
        fleet.refresh()
        run_now(driver.move_all(slot, "stalled", reachable=True))
        if hang is not None:
            self._end_later(life, hang)

    def _end_later(self, life: int, hang: Fault) -> None:
        if self._reaction.end_hung_s is not None:
            self._after(
                self._reaction.end_hung_s, hang.engine, lambda: self._end_hung(life, hang)
            )  # fmt: skip

    def _end_hung(self, life: int, fault: Fault) -> None:
        if self._life[fault.engine] == life:
            self._crash(fault)

    # -- engines end and come back ----------------------------------------------------------------

    def _crash(self, fault: Fault) -> None:
        slots = range(self._fleet.setup.engines) if self._together else (fault.engine,)
        ended = [slot for slot in slots if not self._fleet.engines[slot].dead]
        for slot in ended:
            self._end(slot, host_lost=fault.host_lost)
            self._slow_start[slot] = fault.slow_start if slot == fault.engine else 1.0
            life = self._life[slot]
            self._after(
                max(fault.seconds, self._reaction.crash_s + 1e-3), slot,
                lambda slot=slot, life=life: self._come_back(slot, life),  # type: ignore[misc]
            )  # fmt: skip
        self._after(self._reaction.crash_s, fault.engine, lambda: self._find_dead(ended))

    def _end(self, slot: int, *, host_lost: bool) -> None:
        """The process ends; what it had sent has been sent."""
        fleet = self._fleet
        engine = fleet.engines[slot]
        engine.let_go(fleet.now)
        fleet.hand_over(slot)
        if host_lost:
            for stream_id in self._driver.on_engine[slot]:
                self._driver.owned[stream_id].request.committed = 0
        engine.die()
        fleet.follow(engine)
        self._life[slot] += 1

    def _find_dead(self, slots: list[int]) -> None:
        """It is seen that processes have ended: all of them first, then their streams."""
        for slot in slots:
            self._driver.engine_gone(slot)
        self._fleet.refresh()
        for slot in slots:
            if self._breaks:
                for stream_id in list(self._driver.on_engine[slot]):
                    self._break(stream_id)
            else:
                run_now(self._driver.move_all(slot, "process ended", reachable=False))

    def _break(self, stream_id: str) -> None:
        """The client's stream ends with an error; it asks again at once, from the start. Where no
        token had come, it is the router that asks again, and nothing breaks."""
        owned = self._driver.owned[stream_id]
        request = owned.request
        request.broken = request.broken or bool(owned.stream.delivered)
        request.retries += 1
        run_now(self._driver.end_streams([stream_id], Outcome.FAILED))
        self._fleet.add(f"{request.row}r{request.retries}", request)

    def _come_back(self, slot: int, life: int) -> None:
        if self._life[slot] == life and self._fleet.engines[slot].dead:
            self._set_speed(slot)
            self._fleet.serve(slot, life)

    def _after(self, seconds: float, slot: int, call: Callable[[], None]) -> None:
        self._fleet.at(self._fleet.now + seconds, EventKind.REPAIR, slot, call)
