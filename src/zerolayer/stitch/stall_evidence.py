"""What the stall detector is told and what it answers."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class StallConfig:
    """The operator's settings (one row of `stall_detect_cfg`). ValueError names the field and the
    fix."""

    threshold_ms: float = 80.0
    """A step is late this long after its expected end, and checks are this far apart. Longer than
    the pauses of a busy scheduler, short enough that nobody sees it in a text."""
    consecutive_failures: int = 3
    """Checks or steps in a row that must fail: one bad moment is no stall."""
    adaptive_factor: float = 4.0
    """How many times its own usual lateness a step may take. Two busy cores give 3 by
    themselves."""
    moves_per_minute_max: int = 600
    """Streams moved in 60 s because of stalls. Over it nothing is moved off a living engine."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.threshold_ms <= 60_000.0:
            raise ValueError(f"threshold_ms is {self.threshold_ms}; write 1 to 60000")
        if not 1 <= self.consecutive_failures <= 1_000:
            raise ValueError(
                f"consecutive_failures is {self.consecutive_failures}; write 1 to 1000"
            )
        if not 1.0 <= self.adaptive_factor <= 100.0:
            raise ValueError(f"adaptive_factor is {self.adaptive_factor}; write 1 to 100")
        if self.moves_per_minute_max < 0:
            raise ValueError(
                f"moves_per_minute_max is {self.moves_per_minute_max}; write 0 or more"
            )


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    """What can be seen of one engine at one tick. All times are CLOCK_MONOTONIC in ns."""

    now_ns: int
    """When this was read."""
    owes_work: bool
    """It owns at least one stream that has not ended."""
    step_seq: int
    """Rises with each step (its board)."""
    step_started_ns: int
    """Start of the step that runs; 0 when idle (its board)."""
    prefill_tokens: int
    decode_requests: int
    context_tokens: int
    expected_ns: int
    """What the cost model says of that step; when idle, of the step that it should start now."""
    last_output_ns: int
    """When the serving process last got an output from it; 0 for never."""
    process_gone: bool = False
    """Its core or a worker has ended."""
    stopped: bool = False
    """A process of its tree is in state T."""
    cpu_ns: int | None = None
    """CPU time of its process tree so far; None where it cannot be read (then it is never called
    idle)."""
    runnable: bool = False
    """A process of its tree runs or waits for a core or a disk (state R or D): the box owes it
    something."""
    streams: int = 1
    """Streams that a commit would move; what the move budget counts."""
    step_ended_ns: int = 0
    """End of the last step that ended; 0 where it is not known."""
    waited_ns: int = 0
    """How long its threads have waited for a core so far; never falls. 0 where it is not known."""


class Reason(StrEnum):
    """Why; the value is the metric label."""

    LATE = "late"
    """A step is over its expected end and the threshold."""
    STOPPED = "stopped"
    """State T: somebody stopped it, and it cannot go on by itself."""
    GONE = "gone"
    IDLE = "idle"
    """Owes a late step, and neither uses a CPU nor waits for one."""
    NO_PROGRESS = "no_progress"
    """One step is past the engine's own bound."""
    SLOW_STEPS = "slow_steps"
    """Step after step ends, each past the engine's own bound."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Prefer other engines. Clients notice nothing."""

    engine: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Commit:
    """Move every stream of this engine now."""

    engine: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Clear:
    """A suspect or stalled engine may work again."""

    engine: int


@dataclass(frozen=True, slots=True)
class Starved:
    """These engines look stalled, but it is the box that has no CPU, or nowhere to move to: nothing
    is moved. Said once per spell."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OverBudget:
    """This engine would be moved, but the move budget of this minute is spent. Said once per
    spell."""

    engine: int
    reason: Reason


Verdict = Suspect | Commit | Clear | Starved | OverBudget
