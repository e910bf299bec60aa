"""Which steps an engine finished, seen through samples of its board.

A board shows the current step only, and is read at the pace of the reader. From two samples in a
row follows what ended in between, and for short steps how many.
"""

from dataclasses import dataclass

from zerolayer.dispatch.cost import StepWork

MEAN_OVER_STEPS_MAX = 8
"""Steps between two samples that a mean is formed over. Beyond, nothing is said of any of them."""


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


class StepWatch:
    """Turns samples of one engine's board into finished steps."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: StepSample | None = None

    def sample(self, now: StepSample) -> FinishedStep | None:
        """What ended since the sample before; None for nothing, or nothing that can be told."""
        before, self._last = self._last, now
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
