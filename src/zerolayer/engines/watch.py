"""The watch over all engines: reads evidence, asks the stall detector, acts on its verdicts."""

import asyncio
import time
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from zerolayer.arena.board import CoreState
from zerolayer.arena.tables import StallDetectCfg, StallSettings
from zerolayer.core.engine_state import EngineEvent, EngineState
from zerolayer.core.fleet_state import EngineReport
from zerolayer.dispatch.cost import ErrorPercentiles, StepCostModel, StepTimes, StepWork
from zerolayer.dispatch.pooling import REFRESH_EVERY_S, FleetCosts
from zerolayer.dispatch.steps import StepSample, StepWatch
from zerolayer.engines.lifetime import STALLED_NICE, renice
from zerolayer.engines.standstill import Standstill
from zerolayer.engines.supervisor import LiveEngine
from zerolayer.stitch.stall import (
    Clear,
    Commit,
    EngineEvidence,
    OverBudget,
    Phase,
    Reason,
    StallConfig,
    StallDetector,
    Starved,
    Suspect,
    Verdict,
)

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

logger = init_logger("vllm.zerolayer.watch")

TICK_S = 0.015
#: How often a stalled engine is asked for a round trip, in seconds.
PROBE_EVERY_S = 0.25

#: The step by which engines are compared: four streams of 256 tokens each.
REFERENCE_STEP = StepWork(prefill_tokens=0, decode_requests=4, context_tokens=1024)
REFERENCE_LEARNED = 64


class FleetWatch:
    """One tick every 15 ms: a synchronous look and judgement, then the moves."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._config = StallDetectCfg.create(fleet.runtime.table_path("stall_detect_cfg"))
        self._config.write(StallSettings())
        self._settings = StallSettings()
        self._detector = StallDetector(StallConfig())
        self._costs = FleetCosts()
        self._own_costs = FleetCosts()  # of steps without waiting for a core
        self._steps: list[StepWatch] = []
        self._seen: list[LiveEngine | None] = []
        self._stalled_ns: list[int] = []
        self._was_stopped: list[bool] = []
        self._last_output_ns: list[int] = []
        self._probes: dict[int, asyncio.Task[bool]] = {}
        self._next_probe_ns = self._pool_due_ns = 0
        self.resize(fleet.settings.engines)
        fleet.watch = self

    async def run(self) -> None:
        """Tick for ever."""
        standstill = Standstill(self._fleet.note_all)
        try:
            while True:
                await asyncio.sleep(TICK_S)
                standstill.tick(time.monotonic_ns())
                await self._tick()
        finally:
            standstill.end()
            for probe in self._probes.values():
                probe.cancel()

    def resize(self, slots: int) -> None:
        """The fleet has so many slots now: new ones know nothing, those behind are forgotten."""
        before = len(self._steps)
        for costs in (self._costs, self._own_costs):
            costs.resize([*costs.models, *(StepCostModel() for _ in range(before, slots))][:slots])
        for slot in range(before, slots):
            self._steps.append(StepWatch())
            self._seen.append(None)
            self._stalled_ns.append(0)
            self._was_stopped.append(False)
            self._last_output_ns.append(0)
            self._detector.restarted(slot)
        for slot in range(slots, before):
            self._detector.restarted(slot)
            if (probe := self._probes.pop(slot, None)) is not None:
                probe.cancel()
        for kept in (
            self._steps, self._seen, self._stalled_ns, self._was_stopped, self._last_output_ns,
        ):  # fmt: skip
            del kept[slots:]

    def expected_step_s(self, slot: int) -> float:
        """What the slot's engine needs for its current kind of step, in seconds."""
        state = self._fleet.boards[slot].read_core() or CoreState()
        return self._costs.times[slot].expected_s(*_work(state))

    def reference_step_s(self, slot: int) -> float | None:
        """What the slot's engine needs for `REFERENCE_STEP`, in seconds; None while its cost model
        has learned from fewer than `REFERENCE_LEARNED` steps."""
        work = REFERENCE_STEP
        if self._costs.models[slot].steps < REFERENCE_LEARNED:
            return None
        return self._costs.times[slot].expected_s(
            work.prefill_tokens, work.decode_requests, work.context_tokens
        )

    def step_model(self, slot: int) -> StepTimes:
        """What the slot's steps cost, as it was learned."""
        return self._costs.times[slot]

    def step_errors(self, slot: int) -> ErrorPercentiles:
        """How far the slot's predicted step times were off lately."""
        return self._costs.models[slot].error_percentiles()

    def decode_step_s(self, slot: int) -> tuple[float, float]:
        """What a step without prefill takes with the streams that decode there, in seconds: as they
        see it, and without what the engine waits for cores."""
        load = self._fleet.driver.fleet
        decoding = int(load.running_requests[slot] - load.waiting_requests[slot])
        work = (0, decoding, int(load.running_tokens[slot]))
        costs = (self._costs, self._own_costs)
        seen_s, own_s = (each.times[slot].expected_s(*work) for each in costs)
        return seen_s, own_s

    def noted_output(self, slot: int) -> None:
        """An output of this engine has just come."""
        self._last_output_ns[slot] = time.monotonic_ns()

    async def _tick(self) -> None:
        self._follow_settings()
        now_ns = time.monotonic_ns()
        if now_ns >= self._pool_due_ns:
            self._pool_due_ns = now_ns + int(REFRESH_EVERY_S * 1e9)
            for costs in (self._costs, self._own_costs):
                costs.refresh(self._fleet.driver.fleet.domain)
        evidence = {
            supervisor.slot: self._look(supervisor.slot, supervisor.live, now_ns)
            for supervisor in self._fleet.supervisors
            if self._followed(supervisor.slot, supervisor.live) is not None
            and supervisor.live is not None
        }
        for verdict in self._detector.tick(now_ns, evidence):
            await self._act(verdict)
        self._handle_stalled(now_ns)
        self._fleet.placing.tick(self._fleet.driver, now_ns)

    def _follow_settings(self) -> None:
        """Operators change the table while the fleet runs."""
        settings = self._config.read()
        if settings is None or settings == self._settings:
            return
        self._settings = settings
        self._detector.config = StallConfig(
            threshold_ms=settings.threshold_ms,
            consecutive_failures=settings.consecutive_failures,
            adaptive_factor=settings.adaptive_factor,
            moves_per_minute_max=settings.moves_per_minute_max,
        )
        logger.info("Stall settings changed: %s", settings)

    def _followed(self, slot: int, live: LiveEngine | None) -> LiveEngine | None:
        """The live engine; another incarnation than before starts with a clean history."""
        if live is not self._seen[slot]:
            self._seen[slot] = live
            self._detector.restarted(slot)
            self._steps[slot] = StepWatch()
            self._stalled_ns[slot] = self._last_output_ns[slot] = 0
        return live

    def _look(self, slot: int, live: LiveEngine | None, now_ns: int) -> EngineEvidence:
        assert live is not None
        state = self._fleet.boards[slot].read_core() or CoreState()
        work = _work(state)
        expected_s = self._costs.times[slot].expected_s(*work)
        owes = bool(self._fleet.driver.on_engine[slot]) or self._stalled_ns[slot] > 0
        late = now_ns - state.step_started_ns > 1e9 * expected_s
        tree = live.tree.look(now_ns, threads=owes and late)
        self._learn(slot, state, now_ns, tree.waited_ns)
        expected_s = self._costs.times[slot].expected_s(*work)
        self._report(slot, state, expected_s)
        block_tokens = self._fleet.vllm_config.cache_config.block_size
        self._fleet.picture.look(slot, state, block_tokens, now_ns)
        if self._was_stopped[slot] and not tree.stopped:
            renice(live.launched.pids, 0)  # somebody continued it: let it show what it can
        self._was_stopped[slot] = tree.stopped
        return EngineEvidence(
            now_ns=now_ns,
            owes_work=owes,
            step_seq=state.step_seq,
            step_started_ns=state.step_started_ns,
            prefill_tokens=state.prefill_tokens,
            decode_requests=state.decode_requests,
            context_tokens=state.context_tokens,
            expected_ns=int(1e9 * expected_s),
            last_output_ns=self._last_output_ns[slot],
            process_gone=live.ended.done(),
            stopped=tree.stopped,
            cpu_ns=tree.cpu_ns,
            runnable=tree.runnable,
            streams=len(self._fleet.driver.on_engine[slot]),
            step_ended_ns=state.step_ended_ns,
            waited_ns=tree.waited_ns,
        )

    def _learn(self, slot: int, state: CoreState, now_ns: int, waited_ns: int) -> None:
        """Teach the cost models the step that has ended since the last look."""
        sample = StepSample(
            now_ns, state.step_seq, state.step_started_ns, StepWork(*_work(state)),
            state.step_ended_ns, waited_ns,
        )  # fmt: skip
        finished = self._steps[slot].sample(sample)
        # What a stalled engine needs for its probes says nothing about a healthy one.
        if finished is not None and self._detector.phase(slot) is not Phase.COMMITTED:
            self._costs.observe(slot, finished.work, finished.seconds)
            self._own_costs.observe(slot, finished.work, finished.own_s)

    def _report(self, slot: int, state: CoreState, expected_s: float) -> None:
        used = 1 - state.free_blocks / state.total_blocks if state.total_blocks else 0.0
        times = self._costs.times[slot]
        self._fleet.driver.fleet.report(
            slot,
            EngineReport(
                kv_used_fraction=used,
                in_flight_prefill_tokens=state.prefill_tokens if state.step_started_ns else 0,
                expected_step_s=expected_s,
                prefill_s_per_token=times.prefill_s,
                decode_s_per_request=times.decode_s,
                context_s_per_token=times.context_s,
                admitted_requests=state.running_requests,
            ),
        )

    # -- verdicts ---------------------------------------------------------------------------------

    async def _act(self, verdict: Verdict) -> None:
        driver = self._fleet.driver
        named = verdict.engines if isinstance(verdict, Starved) else (verdict.engine,)
        if max(named) >= len(self._fleet.supervisors):
            return  # the slot was taken away while an earlier verdict was carried out
        match verdict:
            case Suspect(engine, reason):
                # Too frequent for the fleet's log: on busy cores most suspicions last one step.
                self._fleet.supervisors[engine].record.suspicions += 1
                self._apply(engine, EngineEvent.SUSPECTED)
                logger.debug("Engine e%d is suspect: %s", engine, reason.value)
            case Clear(engine):
                was_stalled = self._stalled_ns[engine] > 0
                self._stalled_ns[engine] = 0
                what = "proved progress and is back" if was_stalled else ""
                self._apply(engine, EngineEvent.CLEARED, what)
                await driver.place_waiting()
            case Commit(engine, Reason.GONE) if self._fleet.supervisors[engine].ends_as_ordered:
                pass  # no fault: a roll or a smaller fleet ended it, and its supervisor is at it
            case Commit(engine, reason):
                if driver.lives[engine].can(EngineEvent.STALLED):
                    self._stalled_ns[engine] = time.monotonic_ns()
                    self._apply(engine, EngineEvent.STALLED, f"stalled: {reason.value}")
                    record = self._fleet.supervisors[engine].record
                    record.last_fault = f"stalled: {reason.value}"
                    self._set_aside(engine)
                    await driver.move_all(engine, f"stalled: {reason.value}", reachable=True)
            case Starved(engines):
                names = ", ".join(f"e{slot}" for slot in engines)
                self._fleet.note(engines[0], f"the box is starved ({names} late): nothing moved")
            case OverBudget(engine, reason):
                self._fleet.note(engine, f"stalled ({reason.value}), but the move budget is spent")

    def _apply(self, engine: int, event: EngineEvent, what: str = "") -> None:
        if self._fleet.driver.lives[engine].can(event):
            self._fleet.driver.apply(engine, event)
            if what:
                self._fleet.note(engine, what)

    def _handle_stalled(self, now_ns: int) -> None:
        """Ask stalled engines for proof of progress; end those that give none for too long."""
        for slot, probe in list(self._probes.items()):
            if probe.done():
                del self._probes[slot]
                if probe.result():
                    self._detector.proved(slot, now_ns)
        if now_ns < self._next_probe_ns:
            return
        self._next_probe_ns = now_ns + int(PROBE_EVERY_S * 1e9)
        for slot, since_ns in enumerate(self._stalled_ns):
            live = self._fleet.supervisors[slot].live
            if since_ns == 0 or live is None:
                continue
            if now_ns - since_ns > self._settings.restart_after_s * 1e9:
                live.end(f"no progress for {self._settings.restart_after_s:.0f} s after a stall")
            elif now_ns - since_ns < self._detector.hold_s(slot) * 1e9:
                continue  # a probe takes cores that its streams need elsewhere now
            elif slot not in self._probes and self._stalled(slot):
                self._probes[slot] = asyncio.create_task(self._prove(live))

    def _set_aside(self, engine: int) -> None:
        live = self._fleet.supervisors[engine].live
        if live is not None:
            renice(live.launched.pids, STALLED_NICE)

    @staticmethod
    async def _prove(live: LiveEngine) -> bool:
        """A round trip first; only an engine that answers gets its CPU priority back."""
        if not await live.port.answers():
            return False
        renice(live.launched.pids, 0)
        return await live.port.computes()

    def _stalled(self, slot: int) -> bool:
        return self._fleet.driver.lives[slot].state is EngineState.STALLED


def _work(state: CoreState) -> tuple[int, int, int]:
    """(prefill tokens, decoding requests, context tokens) of the current or last step."""
    return state.prefill_tokens, state.decode_requests, state.context_tokens
