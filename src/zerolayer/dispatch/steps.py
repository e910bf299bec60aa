"""Which steps an engine finished, seen through samples of its board.

A board shows the current step only, and is read at the pace of the reader. From two samples in a
row follows what ended in between, and for short steps how many.
"""

from dataclasses import dataclass, replace

from zerolayer.dispatch.cost import StepWork

MEAN_OVER_STEPS_MAX = 8
"""Steps between two samples that a mean is formed over. Beyond, nothing is said of any of them."""
WAITED_SHARE_MAX = 0.9
"""At most this share of a step is put down to waiting for a core: who gets less than a tenth of one
for ten times as long as a step may take had better be left, whosever fault it is."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """A board's step fields as read at `now_ns`. All times are CLOCK_MONOTONIC in ns."""

    now_ns: int
    step_seq: int
    step_started_ns: int
    """0 when the engine is idle."""
    work: StepWork
    step_ended_ns: int = 0
    """End of the last step that ended; 0 where it is not known."""
    waited_ns: int = 0
    """How long the engine has waited for a core so far; never falls."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ended between two samples, or the mean of a few equal ones."""

    work: StepWork
    seconds: float
    seconds_min: float
    """It took at least this long. Equal to `seconds` where the engine measured both ends; otherwise
    the end was seen at the next sample or start, and `seconds` is up to one sampling interval too
    long."""
    steps: int = 1
    waited_s: float = 0.0
    """How much of `seconds_min` it waited for a core; at most `WAITED_SHARE_MAX` of it."""

    @property
    def own_s(self) -> float:
        """What it took without waiting for a core."""
        return self.seconds - self.waited_s


class StepWatch:
    """Turns samples of one engine's board into finished steps."""

    __slots__ = ("_last", "_waited_before_ns")

    def __init__(self) -> None:
        self._last: StepSample | None = None
        self._waited_before_ns = 0

    def sample(self, now: StepSample) -> FinishedStep | None:
        """What ended since the sample before; None for nothing, or nothing that can be told."""
        before, self._last = self._last, now
        done = self._ended(before, now)
        if done is not None:
            done = self._with_wait(done, now)
        if before is None or now.step_started_ns != before.step_started_ns:
            # What it waited between two samples is put down to the step that was seen at the first.
            self._waited_before_ns = now.waited_ns
        return done

    def _with_wait(self, done: FinishedStep, now: StepSample) -> FinishedStep:
        waited_s = max(0, now.waited_ns - self._waited_before_ns) * 1e-9 / done.steps
        return replace(done, waited_s=min(waited_s, WAITED_SHARE_MAX * done.seconds_min))

    def _ended(self, before: StepSample | None, now: StepSample) -> FinishedStep | None:
        if before is None or before.step_started_ns == 0 or now.step_seq < before.step_seq:
            return None
        if now.step_started_ns == before.step_started_ns:
            return self._ended_in_place(before, now)
        if before.step_ended_ns > before.step_started_ns:
            return None  # told when its end was read
        steps = max(1, now.step_seq - before.step_seq)
        if steps > 1:
            return self._mean(before, now, steps)
        end = now.step_ended_ns
        if before.step_started_ns <= end <= now.now_ns:
            return _finished(before, end, end)
        return _finished(before, before.now_ns, now.step_started_ns or now.now_ns)

    def _ended_in_place(self, before: StepSample, now: StepSample) -> FinishedStep | None:
        """The board still shows the same step: did its end appear?"""
        ended = now.step_ended_ns > now.step_started_ns >= before.step_ended_ns
        return _finished(before, now.step_ended_ns, now.step_ended_ns) if ended else None

    def _mean(self, before: StepSample, now: StepSample, steps: int) -> FinishedStep | None:
        """Several steps: their mean says something only if all were alike and the engine stayed
        busy."""
        alike = before.work.prefill_tokens == 0 and now.work.prefill_tokens == 0
        if steps > MEAN_OVER_STEPS_MAX or not alike or now.step_started_ns == 0:
            return None
        return _finished(before, now.step_started_ns, now.step_started_ns, steps)


def _finished(
    before: StepSample, end_min_ns: int, end_ns: int, steps: int = 1
) -> FinishedStep | None:
    """The step that `before` showed, ended between the two times; None when the board contradicts
    itself."""
    shortest_ns = end_min_ns - before.step_started_ns
    longest_ns = end_ns - before.step_started_ns
    if not 0 <= shortest_ns <= longest_ns:
        return None
    per_step_s = 1e-9 / steps
    return FinishedStep(before.work, longest_ns * per_step_s, shortest_ns * per_step_s, steps)
