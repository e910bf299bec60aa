"""What the dispatcher learns of the engines: the same reports as a live fleet's watch makes.

The watch reads a board per engine every 15 ms and teaches one cost model per engine its steps
(`engines.watch`). Here reports are made when a decision is near, at most that often, and after the
first steps a model is taught one step in LEARN_EVERY_S, which is where the time would go. So a slow
engine is known by its steps alone. Models start at the hardware's nominal times.
"""

from dataclasses import dataclass

import numpy as np

from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.fleet_state import EngineReport, Floats, MemoryReport
from zerolayer.dispatch.cost import StepCostModel, StepWork
from zerolayer.dispatch.drain_rule import DrainRule
from zerolayer.dispatch.heat import heat_of
from zerolayer.dispatch.pooling import REFRESH_EVERY_S, FleetCosts
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.profiles import EngineProfile
from zerolayer.stitch.driver import FleetDriver

REPORT_EVERY_S = 0.015
FORECAST_EVERY_S = 0.2
MEMORY_S = 1.0
"""Rates forget the past with this time constant, as live."""
LEARN_EVERY_S = 0.1
STEPS_ALL_LEARNED = 20
SUSPECT_AFTER_S = 0.08
"""Lateness of a step that makes its engine a suspect: `threshold_ms` of the stall detector."""


@dataclass(slots=True)
class _Rates:
    """An engine's counters at the last picture, and the rates that follow from them."""

    tokens: int = 0
    written: int = 0
    tokens_per_s: float = 0.0
    written_per_s: float = 0.0


class Reports:
    """Brings `driver.fleet` up to date before decisions."""

    def __init__(
        self, driver: FleetDriver, engines: list[SimEngine], profile: EngineProfile, *, watch: bool
    ) -> None:
        """`watch`: late steps make an engine suspect, a full one hot, and snapshots use its link,
        as in our fleet; others have no such rules."""
        self._driver = driver
        self._engines = engines
        self._watch = watch
        self._costs = FleetCosts()
        self._costs.resize([StepCostModel(profile.prior()) for _ in engines])
        self._learned_s = [-1.0] * len(engines)
        self._reported_s = self._forecast_s = self._pooled_s = -1.0
        self._rates = [_Rates() for _ in engines]
        self._drain = DrainRule(len(engines))
        self._snapshot_s_per_token = profile.restore_s_per_token
        """Pages go out over the same link, and at the same pace, as they come in."""

    def forget(self, slot: int) -> None:
        """A new process is in this slot. Its machine is the same, and so is its model."""
        self._learned_s[slot] = -1.0

    def learn(self, slot: int, now: float) -> None:
        """The engine has ended a step, or several alike."""
        steps = self._costs.models[slot].steps
        if steps >= STEPS_ALL_LEARNED and now - self._learned_s[slot] < LEARN_EVERY_S:
            return
        self._learned_s[slot] = now
        engine = self._engines[slot]
        self._costs.observe(slot, StepWork(*engine.last_work), engine.last_step_s)

    def decode_step_s(self) -> Floats:
        """Seconds of a step of each engine with the streams that it has, without prefill."""
        fleet = self._driver.fleet
        decodes = (fleet.running_requests - fleet.waiting_requests).tolist()
        context = fleet.running_tokens.tolist()
        return np.array(
            [times.expected_s(0, int(decodes[i]), int(context[i])) for i, times in
             enumerate(self._costs.times)]
        )  # fmt: skip

    def refresh(self, now: float, now_ns: int) -> None:
        """A decision is near."""
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            for engine in self._engines:
                if not engine.dead:
                    self._report(engine, now)
        if now - self._forecast_s >= FORECAST_EVERY_S:
            passed_s, self._forecast_s = now - self._forecast_s, now
            driver = self._driver
            for engine in self._engines:
                if not engine.dead:
                    self._picture(engine, passed_s)
            if now - self._pooled_s >= REFRESH_EVERY_S:
                self._pooled_s = now
                self._costs.refresh(driver.fleet.domain)
            driver.outlook.refresh(now_ns, driver.fleet, driver.placed_streams())
            if self._watch:
                heat = heat_of(driver.fleet)
                driver.fleet.hot[:] = self._drain.sample_all(heat.util.tolist(), heat.mem.tolist())

    def _report(self, engine: SimEngine, now: float) -> None:
        slot = engine.slot
        times = self._costs.times[slot]
        expected_s = times.expected_s(*engine.work)
        self._driver.fleet.report(
            slot,
            EngineReport(
                kv_used_fraction=engine.kv.used / engine.kv.capacity,
                in_flight_prefill_tokens=engine.work[0] if engine.busy else 0,
                expected_step_s=expected_s,
                prefill_s_per_token=times.prefill_s,
                decode_s_per_request=times.decode_s,
                context_s_per_token=times.context_s,
                admitted_requests=len(engine.running),
            ),
        )
        if self._watch:
            self._judge(slot, late=engine.late_s(now) > expected_s + SUSPECT_AFTER_S)

    def _picture(self, engine: SimEngine, passed_s: float) -> None:
        """Memory and rates as `engines.picture` shows them; blocks are taken to be in one piece."""
        rates = self._rates[engine.slot]
        share = passed_s / (passed_s + MEMORY_S)
        tokens, written = engine.generated, engine.generated + engine.computed_tokens
        rates.tokens_per_s += share * ((tokens - rates.tokens) / passed_s - rates.tokens_per_s)
        rates.written_per_s += share * ((written - rates.written) / passed_s - rates.written_per_s)
        rates.tokens, rates.written = tokens, written
        free = engine.kv.capacity - engine.kv.used
        link_use = rates.written_per_s * self._snapshot_s_per_token if self._watch else 0.0
        self._driver.fleet.picture(
            engine.slot, MemoryReport(free, free, link_use, rates.tokens_per_s)
        )

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
