"""One engine under watch: what its evidence says by itself, tick after tick.

Everything that takes more than one engine to decide (starved box, move budget) is in `stall`.
"""

from enum import Enum, auto

from zerolayer.dispatch.cost import StepWork
from zerolayer.dispatch.steps import WAITED_SHARE_MAX, FinishedStep, StepSample, StepWatch
from zerolayer.stitch.stall_evidence import EngineEvidence, Reason, StallConfig
from zerolayer.stitch.stall_history import SECOND_NS, Readmission, StepHistory

MILLISECOND_NS = 1_000_000
STOPPED_TICKS = 2
"""One tick in state T may be a debugger that looks in."""
PREFILL_STEP_TOKENS = 64
"""A step with more prompt tokens has a history of its own: prefills are predicted less well."""
SOFT_FLOOR_NS = 500 * MILLISECOND_NS
"""Without hard evidence no engine is given up sooner after its expected end: loading pages or a
burst of page faults took up to 226 ms on a healthy one."""
COLD_FLOOR_NS = 3 * SECOND_NS
"""The same for an engine with too little history of that kind of step: first steps compile and warm
up."""
COLD_RATIO = 2.0
SLOWNESS_MAX = 2.0
"""How much of the other engines' lateness is put down to the box."""
RATIO_MAX = 15.0
"""Bound on actual / expected whatever the history says, so that 20 times slower is always
caught."""
SLOW_EXCESS_NS = 10 * MILLISECOND_NS
"""A step that is over by less than this is not slow, whatever its ratio."""
IDLE_CPU_SHARE = 0.05
IDLE_CPU_NS = 10 * MILLISECOND_NS
"""CPU that a hung process may use: heartbeat threads, and one tick of the kernel's coarse clock."""
HUNGRY_CPU_SHARE = 0.5
RECENT_NS = 5 * SECOND_NS
FORGET_IDLE_NS = SECOND_NS
"""Slow steps of an engine that owes nothing are forgotten after this: nobody sends it work while it
is suspect, so it could never show a good one."""


class Phase(Enum):
    """What the detector thinks of an engine."""

    CLEAR = auto()
    SUSPECT = auto()
    COMMITTED = auto()


class EngineWatch:
    """Evidence of one engine, condensed. `see` once a tick, then `check`, then ask."""

    def __init__(self, evidence: EngineEvidence) -> None:
        self.phase = Phase.CLEAR
        self.readmission = Readmission()
        self.evidence = evidence
        self.over_budget = False
        self._steps = StepWatch()
        self._histories = (StepHistory(), StepHistory())  # decode steps, prefill steps
        self._last_kind = 0
        self._last_finished_ns: int | None = None
        self._step_expected_ns = evidence.expected_ns
        self._since_ns = evidence.now_ns
        self._excused_ns = 0
        self._waited_before_ns = evidence.waited_ns
        self._stopped_ticks = 0
        self._stopped_since_ns = 0
        self._slow_steps = 0
        self._slow_since_ns = 0
        self._suspected_ns = evidence.now_ns
        self._cpu_ns = evidence.cpu_ns
        self._next_check_ns = evidence.now_ns
        self._seen_runnable = False
        self._idle_checks = 0
        self._late_checks = 0

    # -- what is seen

    def see(
        self, evidence: EngineEvidence, config: StallConfig, slowness: float, missed_ns: int
    ) -> None:
        """Take in a tick. `slowness` is the box's (1 or more), `missed_ns` how late this tick
        itself is."""
        before, self.evidence = self.evidence, evidence
        self._note_finished(before, config, slowness, unsure=missed_ns > 0 or self._excused_ns > 0)
        self._note_progress(before)
        self._note_stop()
        self._forget_when_idle()
        if missed_ns > 0:
            self._excused_ns += min(missed_ns, max(0, evidence.now_ns - self._since_ns))
            self._next_check_ns = evidence.now_ns + _threshold_ns(config)

    def _note_finished(
        self, before: EngineEvidence, config: StallConfig, slowness: float, *, unsure: bool
    ) -> None:
        now = self.evidence
        done = self._steps.sample(_sample(now))
        if done is not None and not unsure:
            self._judge_step(done, self._step_expected_ns, config, slowness)
        elif before.step_started_ns == now.step_started_ns == 0 and now.step_seq > before.step_seq:
            self._slow_steps = 0  # began and ended within one tick
        if now.step_started_ns:
            self._step_expected_ns = max(MILLISECOND_NS, now.expected_ns)

    def _judge_step(
        self, done: FinishedStep, expected_ns: int, config: StallConfig, slowness: float
    ) -> None:
        kind = _kind(done.work.prefill_tokens)
        bound = self._ratio_bound(kind, config, slowness)
        shortest_ns = (done.seconds_min - done.waited_s) * 1e9
        slow = shortest_ns > max(bound * expected_ns, expected_ns + SLOW_EXCESS_NS)
        if slow and self._histories[kind].warm:
            if self._slow_steps == 0:
                self._slow_since_ns = self.evidence.now_ns - int(shortest_ns)
            self._slow_steps += done.steps
        else:
            self._slow_steps = 0
        if not (slow and self.phase is Phase.COMMITTED):
            # A slow engine that is asked again and again to prove itself must not become usual.
            self._histories[kind].add(done.seconds * 1e9 / expected_ns)
        self._last_kind, self._last_finished_ns = kind, self.evidence.now_ns

    def _note_progress(self, before: EngineEvidence) -> None:
        """A new step, a step's end, an output or newly owed work starts the count again."""
        now = self.evidence
        stepped = (now.step_seq, now.step_started_ns) != (before.step_seq, before.step_started_ns)
        if stepped or (now.owes_work and not before.owes_work):
            self._since_ns = now.step_started_ns or now.now_ns
        elif now.last_output_ns > before.last_output_ns:
            # Also when the board is not written any more: an engine that answers is alive.
            self._since_ns = max(self._since_ns, now.last_output_ns)
        else:
            return
        self._excused_ns, self._waited_before_ns = 0, now.waited_ns
        self._start_suspicion(now.now_ns, self._next_check_ns - now.now_ns)

    def _note_stop(self) -> None:
        if not self.evidence.stopped:
            self._stopped_ticks = 0
            return
        if self._stopped_ticks == 0:
            self._stopped_since_ns = self.evidence.now_ns
        self._stopped_ticks += 1

    def _forget_when_idle(self) -> None:
        now = self.evidence
        if now.owes_work or now.step_started_ns:
            return
        if now.now_ns - (self._last_finished_ns or 0) > FORGET_IDLE_NS:
            self._slow_steps = 0

    # -- what it means

    def suspicion(self, config: StallConfig) -> Reason | None:
        """Why new work should go elsewhere; None when all is well."""
        now = self.evidence
        if self.stopped:
            stopped_ns = now.now_ns - self._stopped_since_ns
            if stopped_ns >= _threshold_ns(config) or self.is_late(config):
                return Reason.STOPPED
        if self.is_late(config):
            return Reason.LATE
        return Reason.SLOW_STEPS if self._slow_steps > 0 else None

    def is_late(self, config: StallConfig) -> bool:
        """Owes a step that is over its expected end by the threshold."""
        late_ns = self._elapsed_ns - self._expected_ns
        return self.evidence.owes_work and late_ns > _threshold_ns(config)

    @property
    def stopped(self) -> bool:
        """In state T for long enough to believe it."""
        return self._stopped_ticks >= STOPPED_TICKS

    @property
    def steps_in_time(self) -> bool:
        """Runs, and its last step ended within its bound."""
        return self._slow_steps == 0 and self._stopped_ticks == 0

    def hungry(self) -> bool:
        """Wants a core and got little of one since the suspicion: the box's fault, not its own."""
        cpu_ns = self.evidence.cpu_ns
        if cpu_ns is None or self._cpu_ns is None or not self.evidence.runnable:
            return False
        wall_ns = max(1, self.evidence.now_ns - self._suspected_ns)
        return cpu_ns - self._cpu_ns < HUNGRY_CPU_SHARE * wall_ns

    def past_bound(self, config: StallConfig, slowness: float) -> bool:
        """The step that it owes is past the engine's own bound, or its last steps were."""
        if self._slow_steps > 0:
            return True
        return self.evidence.owes_work and self._own_ns > self._bound_ns(config, slowness)

    def slowness_seen(self) -> float | None:
        """How late its last steps were; None when it finished none lately."""
        last = self._last_finished_ns
        if last is None or self.evidence.now_ns - last > RECENT_NS:
            return None
        return self._histories[self._last_kind].recent

    # -- checks while suspect

    def forgive(self) -> None:
        """What was slow or late until now counts no more, unless it was given up for it."""
        if self.phase is Phase.COMMITTED:
            return
        self._slow_steps = 0
        self._start_suspicion(self.evidence.now_ns, self._next_check_ns - self.evidence.now_ns)

    def suspect(self, config: StallConfig) -> None:
        """Begin to count."""
        self.phase = Phase.SUSPECT
        self._start_suspicion(self.evidence.now_ns, _threshold_ns(config))

    def check(self, config: StallConfig, slowness: float, *, starved: bool) -> None:
        """One check, if one is due. A starved box is no evidence against an engine."""
        now = self.evidence
        self._seen_runnable = self._seen_runnable or now.runnable
        if now.now_ns < self._next_check_ns or not self.is_late(config):
            return
        self._next_check_ns = now.now_ns + _threshold_ns(config)
        if self._is_idle():
            self._idle_checks += 1
        else:
            self._idle_checks, self._cpu_ns, self._suspected_ns = 0, now.cpu_ns, now.now_ns
        self._seen_runnable = False
        if not starved and self._own_ns > self._bound_ns(config, slowness):
            self._late_checks += 1

    def _is_idle(self) -> bool:
        cpu_ns = self.evidence.cpu_ns
        if cpu_ns is None or self._cpu_ns is None or self._seen_runnable:
            return False
        wall_ns = self.evidence.now_ns - self._suspected_ns
        return cpu_ns - self._cpu_ns <= IDLE_CPU_NS + IDLE_CPU_SHARE * wall_ns

    def hard_evidence(self, config: StallConfig) -> Reason | None:
        """What needs no patience."""
        if self.evidence.process_gone:
            return Reason.GONE
        if self.phase is not Phase.SUSPECT or not self.evidence.owes_work:
            return None
        if self.stopped:
            return Reason.STOPPED
        overdue = self._elapsed_ns > 2 * self._expected_ns + _threshold_ns(config)
        if overdue and self._idle_checks >= config.consecutive_failures:
            return Reason.IDLE
        return None

    def soft_evidence(self, config: StallConfig, patience: int) -> Reason | None:
        """What the engine's own bound says, after `patience` times the usual number of failures."""
        if self.phase is not Phase.SUSPECT or not self.evidence.owes_work:
            return None
        needed = config.consecutive_failures * patience
        if self._late_checks >= needed:
            return Reason.NO_PROGRESS
        slow_ns = self.evidence.now_ns - self._slow_since_ns
        if self._slow_steps >= needed and slow_ns >= SOFT_FLOOR_NS:
            return Reason.SLOW_STEPS
        return None

    # -- bounds

    @property
    def _elapsed_ns(self) -> int:
        return self.evidence.now_ns - self._since_ns - self._excused_ns

    @property
    def _own_ns(self) -> float:
        """The same without what it waited for a core, which other programs and engines had."""
        elapsed_ns = self._elapsed_ns
        waited_ns = max(0, self.evidence.waited_ns - self._waited_before_ns)
        return elapsed_ns - min(waited_ns, WAITED_SHARE_MAX * elapsed_ns)

    @property
    def _expected_ns(self) -> int:
        return max(MILLISECOND_NS, self.evidence.expected_ns)

    def _ratio_bound(self, kind: int, config: StallConfig, slowness: float) -> float:
        history = self._histories[kind]
        ratio = config.adaptive_factor * history.usual * min(SLOWNESS_MAX, slowness)
        if not history.warm:
            ratio *= COLD_RATIO
        return min(ratio, max(RATIO_MAX, config.adaptive_factor))

    def _bound_ns(self, config: StallConfig, slowness: float) -> float:
        kind = _kind(self.evidence.prefill_tokens)
        expected_ns = self._expected_ns
        adaptive_ns = expected_ns * self._ratio_bound(kind, config, slowness) + _threshold_ns(
            config
        )
        floor_ns = SOFT_FLOOR_NS if self._histories[kind].warm else COLD_FLOOR_NS
        return max(adaptive_ns, expected_ns + floor_ns)

    def _start_suspicion(self, now_ns: int, first_check_in_ns: int) -> None:
        self._suspected_ns = now_ns
        self._cpu_ns = self.evidence.cpu_ns
        self._next_check_ns = now_ns + first_check_in_ns
        self._seen_runnable = False
        self._idle_checks = 0
        self._late_checks = 0


def _threshold_ns(config: StallConfig) -> int:
    return int(config.threshold_ms * MILLISECOND_NS)


def _kind(prefill_tokens: int) -> int:
    return int(prefill_tokens > PREFILL_STEP_TOKENS)


def _sample(evidence: EngineEvidence) -> StepSample:
    work = StepWork(evidence.prefill_tokens, evidence.decode_requests, evidence.context_tokens)
    return StepSample(
        evidence.now_ns, evidence.step_seq, evidence.step_started_ns, work, evidence.step_ended_ns,
        evidence.waited_ns,
    )  # fmt: skip
