"""Stalled, slow, or only starved? The judgement over all engines, once a tick.

1. An engine is *suspect* when the step that it owes is `threshold_ms` over its expected end, when
   it is stopped, or when its last step was past its own bound.
2. It is *committed* (its streams are to be moved)
   - at once when its process is gone, and when it is suspect and a process of it is stopped;
   - after `consecutive_failures` checks, `threshold_ms` apart, when it neither uses nor wants a
     CPU;
   - after as many checks with a step past the engine's own bound, or as many steps past it.
3. If every engine that owes work is suspect without hard evidence, the box is *starved* and nothing
   is moved. A single owing engine beside idle ones gets twice the patience, and is starved if it
   wants a core and gets less than half of one; without any other engine the soft rules never move
   it.
4. Moves off living engines are limited per minute.
5. A committed engine is *cleared* once a round trip was reported, a step ended, the last step was
   in time, and a hold is over that doubles with each further stall.

Ticks come every 10 to 20 ms. A tick that comes over TICK_LATE_NS late says that this process, or
the box, slept: that time is held against no engine.

Time in which an engine waited for a core is no time that its step took: it is left out of what is
held against its own bound (rules 2b and 2c), up to nine tenths. A stopped or hung engine waits for
nothing.

An engine that comes up took its share of the box while it started: what was late meanwhile counts
against no other engine.

The expected times must not come from the fault itself: who feeds the cost model leaves out the
steps of an engine whose `phase` is COMMITTED.
"""

from collections.abc import Mapping

from zerolayer.stitch.stall_evidence import (
    Clear,
    Commit,
    EngineEvidence,
    OverBudget,
    Reason,
    StallConfig,
    Starved,
    Suspect,
    Verdict,
)
from zerolayer.stitch.stall_history import MoveBudget
from zerolayer.stitch.stall_watch import MILLISECOND_NS, EngineWatch, Phase

__all__ = [
    "Clear",
    "Commit",
    "EngineEvidence",
    "OverBudget",
    "Phase",
    "Reason",
    "StallConfig",
    "StallDetector",
    "Starved",
    "Suspect",
    "Verdict",
]

TICK_LATE_NS = 100 * MILLISECOND_NS
"""Ticks further apart than this are late."""
LONE_PATIENCE = 2
"""A single engine at work has no other beside it to tell a slow box from a slow engine."""


class StallDetector:
    """Judges all engines. One call of `tick` is one synchronous decision."""

    def __init__(self, config: StallConfig) -> None:
        self.config = config
        """May be replaced at any time; holds from the next tick on."""
        self._watches: dict[int, EngineWatch] = {}
        self._budget = MoveBudget()
        self._last_tick_ns: int | None = None
        self._starved_spell = False

    def tick(self, now_ns: int, evidence: Mapping[int, EngineEvidence]) -> list[Verdict]:
        """Verdicts from the evidence of every engine that came up and has a process, or just lost
        it.

        An engine that still starts is left out: nothing can be moved to it, and its load is noise.
        An engine that is left out is not judged at this tick. Order: clears and suspicions by slot,
        then starvation, then commits by slot.
        """
        missed_ns = self._missed_ns(now_ns)
        self._see(evidence, missed_ns)
        present = [slot for slot in sorted(evidence) if not self._is_lost(slot)]
        verdicts = self._suspicions(now_ns, present)
        starved, lone = self._starved(present)
        for slot in present:
            watch = self._watches[slot]
            if watch.phase is Phase.SUSPECT:
                watch.check(self.config, self._slowness(slot), starved=slot in starved)
        verdicts += self._starvation(starved)
        verdicts += self._commits(now_ns, sorted(evidence), starved, lone)
        return verdicts

    def proved(self, engine: int, now_ns: int) -> None:
        """A round trip through the engine's queue, begun after its stall, came back at `now_ns`."""
        watch = self._watches.get(engine)
        if watch is not None:
            watch.readmission.proved(now_ns)

    def restarted(self, engine: int) -> None:
        """A new process is in this slot, or none: nothing that is known of the old one holds."""
        self._watches.pop(engine, None)

    def phase(self, engine: int) -> Phase:
        """What the detector thinks of an engine; CLEAR for one that it never saw."""
        watch = self._watches.get(engine)
        return watch.phase if watch is not None else Phase.CLEAR

    def hold_s(self, engine: int) -> float:
        """How long the engine is kept out after its last stall, in seconds."""
        watch = self._watches.get(engine)
        return watch.readmission.hold_ns / 1e9 if watch is not None else 0.0

    # -- one tick

    def _missed_ns(self, now_ns: int) -> int:
        before, self._last_tick_ns = self._last_tick_ns, now_ns
        gap_ns = now_ns - before if before is not None else 0
        return gap_ns if gap_ns > TICK_LATE_NS else 0

    def _see(self, evidence: Mapping[int, EngineEvidence], missed_ns: int) -> None:
        for slot in sorted(evidence):
            if slot not in self._watches:
                for other in self._watches.values():
                    other.forgive()
                self._watches[slot] = EngineWatch(evidence[slot])
            slowness = self._slowness(slot)
            self._watches[slot].see(evidence[slot], self.config, slowness, missed_ns)

    def _is_lost(self, slot: int) -> bool:
        return self._watches[slot].evidence.process_gone

    def _suspicions(self, now_ns: int, present: list[int]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for slot in present:
            watch = self._watches[slot]
            reason = watch.suspicion(self.config)
            if watch.phase is Phase.COMMITTED:
                if self._may_return(now_ns, watch):
                    watch.phase = Phase.CLEAR
                    verdicts.append(Clear(slot))
            elif watch.phase is Phase.CLEAR and reason is not None:
                watch.suspect(self.config)
                verdicts.append(Suspect(slot, reason))
            elif watch.phase is Phase.SUSPECT and reason is None and watch.steps_in_time:
                watch.phase, watch.over_budget = Phase.CLEAR, False
                verdicts.append(Clear(slot))
        return verdicts

    def _may_return(self, now_ns: int, watch: EngineWatch) -> bool:
        """Its proofs are there, and nothing speaks against it now. Its streams were moved, so
        without a step at work it owes none."""
        evidence = watch.evidence
        at_fault = evidence.step_started_ns > 0 and watch.is_late(self.config)
        proved = watch.readmission.may_return(now_ns, evidence.step_seq)
        return proved and watch.steps_in_time and not at_fault

    def _starved(self, present: list[int]) -> tuple[frozenset[int], bool]:
        """Engines whose lateness is the box's, and whether a single engine is at work."""
        live = [slot for slot in present if self._watches[slot].phase is not Phase.COMMITTED]
        moving = [slot for slot in live if not self._watches[slot].stopped]
        owing = [slot for slot in moving if self._watches[slot].evidence.owes_work]
        lone = len(owing) == 1
        if any(self._watches[slot].phase is not Phase.SUSPECT for slot in owing):
            return frozenset(), lone
        if lone and len(moving) > 1 and not self._watches[owing[0]].hungry():
            return frozenset(), lone
        return frozenset(owing), lone

    def _starvation(self, starved: frozenset[int]) -> list[Verdict]:
        """Say it once, and only when it kept an engine from being judged."""
        if not starved:
            self._starved_spell = False
        withheld = any(
            self._watches[slot].past_bound(self.config, self._slowness(slot)) for slot in starved
        )
        if not withheld or self._starved_spell:
            return []
        self._starved_spell = True
        return [Starved(tuple(sorted(starved)))]

    def _commits(
        self, now_ns: int, slots: list[int], starved: frozenset[int], lone: bool
    ) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for slot in slots:
            watch = self._watches[slot]
            if watch.phase is Phase.COMMITTED:
                continue
            reason = watch.hard_evidence(self.config)
            if reason is None and slot not in starved:
                reason = watch.soft_evidence(self.config, LONE_PATIENCE if lone else 1)
            if reason is not None:
                verdicts += self._commit(now_ns, slot, reason)
        return verdicts

    def _commit(self, now_ns: int, slot: int, reason: Reason) -> list[Verdict]:
        watch = self._watches[slot]
        allowed = self._budget.take(
            now_ns, watch.evidence.streams, self.config.moves_per_minute_max,
            force=reason is Reason.GONE,
        )  # fmt: skip
        if not allowed:
            said, watch.over_budget = watch.over_budget, True
            return [] if said else [OverBudget(slot, reason)]
        watch.phase, watch.over_budget = Phase.COMMITTED, False
        watch.readmission.stalled(now_ns, watch.evidence.step_seq)
        return [Commit(slot, reason)]

    def _slowness(self, engine: int) -> float:
        """How late the other engines at work are: the least of them, as all share the box. 1 or
        more."""
        seen = [
            slowness
            for slot, watch in self._watches.items()
            if slot != engine and watch.phase is not Phase.COMMITTED and watch.evidence.owes_work
            if (slowness := watch.slowness_seen()) is not None
        ]
        return max(1.0, min(seen, default=1.0))
