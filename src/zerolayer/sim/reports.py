"""What the dispatcher learns of the engines: the same reports as a live fleet's watch makes.

The watch reads a board per engine every 15 ms and teaches one cost model per engine its steps
(`engines.watch`). Here reports are made when a decision is near, at most that often, and after the
first steps a model is taught one step in LEARN_EVERY_S, which is where the time would go. So a slow
engine is known by its steps alone. Models start at the hardware's nominal times.
"""

import numpy as np

from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.fleet_state import EngineReport, Floats
from zerolayer.dispatch.cost import StepCostModel, StepWork
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.profiles import EngineProfile
from zerolayer.stitch.driver import FleetDriver

REPORT_EVERY_S = 0.015
FORECAST_EVERY_S = 0.2
LEARN_EVERY_S = 0.1
STEPS_ALL_LEARNED = 20
SUSPECT_AFTER_S = 0.08
"""Lateness of a step that makes its engine a suspect: `threshold_ms` of the stall detector."""


class Reports:
    """Brings `driver.fleet` up to date before decisions."""

    def __init__(
        self, driver: FleetDriver, engines: list[SimEngine], profile: EngineProfile, *, watch: bool
    ) -> None:
        """`watch`: late steps make an engine suspect, as our fleet does; others have no such
        rule."""
        self._driver = driver
        self._engines = engines
        self._watch = watch
        self._prior = profile.prior()
        self.costs = [StepCostModel(self._prior) for _ in engines]
        self._learned_s = [-1.0] * len(engines)
        self._reported_s = self._forecast_s = -1.0

    def forget(self, slot: int) -> None:
        """A new process is in this slot. Its machine is the same, and so is its model."""
        self._learned_s[slot] = -1.0

    def learn(self, slot: int, now: float) -> None:
        """The engine has ended a step, or several alike."""
        cost = self.costs[slot]
        if cost.steps >= STEPS_ALL_LEARNED and now - self._learned_s[slot] < LEARN_EVERY_S:
            return
        self._learned_s[slot] = now
        engine = self._engines[slot]
        cost.observe(StepWork(*engine.last_work), engine.last_step_s)

    def decode_step_s(self) -> Floats:
        """Seconds of a step of each engine with the streams that it has, without prefill."""
        fleet = self._driver.fleet
        decodes = (fleet.running_requests - fleet.waiting_requests).tolist()
        context = fleet.running_tokens.tolist()
        return np.array(
            [cost.expected_s(0, int(decodes[i]), int(context[i])) for i, cost in
             enumerate(self.costs)]
        )  # fmt: skip

    def refresh(self, now: float, now_ns: int) -> None:
        """A decision is near."""
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            for engine in self._engines:
                if not engine.dead:
                    self._report(engine, now)
        if now - self._forecast_s >= FORECAST_EVERY_S:
            self._forecast_s = now
            driver = self._driver
            driver.outlook.refresh(now_ns, driver.fleet, driver.placed_streams())

    def _report(self, engine: SimEngine, now: float) -> None:
        slot = engine.slot
        cost = self.costs[slot]
        expected_s = cost.expected_s(*engine.work)
        self._driver.fleet.report(
            slot,
            EngineReport(
                kv_used_fraction=engine.kv.used / engine.kv.capacity,
                in_flight_prefill_tokens=engine.work[0] if engine.busy else 0,
                expected_step_s=expected_s,
                prefill_s_per_token=cost.prefill_s_per_token,
                decode_s_per_request=cost.decode_s_per_request,
            ),
        )
        if self._watch:
            self._judge(slot, late=engine.late_s(now) > expected_s + SUSPECT_AFTER_S)

    def _judge(self, slot: int, *, late: bool) -> None:
        driver = self._driver
        if late and not driver.fleet.suspect[slot]:
            event = EngineEvent.SUSPECTED
        elif not late and driver.fleet.suspect[slot]:
            event = EngineEvent.CLEARED
        else:
            return
        if driver.lives[slot].can(event):
            driver.apply(slot, event)
