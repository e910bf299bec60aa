"""What one simulated run leaves behind: one row per request, samples over time, and counts.

The boundary between the simulator, which fills it, and statistics and reports, which read it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from zerolayer.core.fleet_state import Floats


class Ending(IntEnum):
    """How a simulated request ended for its client."""

    FINISHED = 0
    BROKEN = 1
    """Its stream broke at least once and the client asked again from the start; the times include
    that."""
    LOST = 2
    """It never finished: refused, or given up."""


REQUEST_ROW = np.dtype(
    [
        ("arrival_s", "f8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("ttft_s", "f8"),  # to the first token that the client saw; NaN when none came
        ("worst_gap_s", "f8"),  # longest pause between two tokens, also one that a fault made
        ("e2e_s", "f8"),  # to the last token; NaN when LOST
        ("ending", "i1"),  # an Ending
        ("moves", "i2"),  # changes of engine that the client did not see
        ("retries", "i2"),  # times that the client asked again
    ]
)


@dataclass(frozen=True, slots=True)
class RunKey:
    """What a run was of. Two runs of equal keys have equal results."""

    trace: str
    policy: str
    continuation: str
    """`snapshot`, `reprefill` or `retry`: what happens to a stream whose engine is lost."""
    utilisation: float
    """Offered load as a share of what the fleet can sustain."""
    faults: str
    """`none`, `base` or `stress`."""
    engines: int
    seed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of one run."""

    key: RunKey
    requests: npt.NDArray[Any]
    """REQUEST_ROW, one per request of the trace, in its order."""
    sample_s: Floats
    """Times of the samples, shape (T,)."""
    util: Floats
    """Utilisation (as `dispatch.forecast` defines it) at each sample, shape (T, engines)."""
    mem: Floats
    """Share of KV in use at each sample, shape (T, engines)."""
    moves: npt.NDArray[Any]
    """Fields `at_s` (f8), `source`, `target` (i2), `context_tokens` (i4), `reason` (U24)."""
    faults: npt.NDArray[Any]
    """Fields `at_s`, `until_s` (f8), `engine` (i2), `kind` (U16)."""
    counts: dict[str, float]
    """Steps, preemptions, prefix hits, decisions, wall seconds: whatever the run counted."""
    log_digest: str
    """Hash over the event log: equal seeds give equal digests."""
