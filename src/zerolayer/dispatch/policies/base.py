"""What every policy gets, gives back and shares: eligibility and fair ties.

Every policy takes the engines that accept, leaves out the excluded ones and other domains, and uses
suspect engines only when no other is left. They differ in what they then hold against an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats

TIE_SECONDS_MAX = 0.05
"""However long the waits are, more than this many seconds apart is not the same."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is known of a stream when it needs an engine."""

    prompt_tokens: int
    """Tokens whose KV the engine must have before the next token comes."""
    expected_output_tokens: int = 0
    """An estimate; never the true length."""
    domain: int | None = None
    """Only engines of this domain; None for any."""
    held_tokens: Mapping[int, int] | None = None
    """Per engine: the leading tokens whose KV it has already or can load without computing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen engine and why."""

    engine: int
    score: float
    """The policy's figure for it; smaller is better. Seconds for ExpectedWait."""
    runner_up: int | None
    """The engine that would come next; None when there was one candidate."""
    reason: str
    """Policy name, and `:suspect` when only suspect engines were left."""


class Policy(Protocol):
    """One way to choose."""

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int]
    ) -> Decision | None:
        """The engine for `request`, or None when none may take it. Changes nothing in `fleet`."""
        ...


class Rotation:
    """Eligibility and fair ties, shared by all policies. Buffers live as long as the policy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0  # the slot that a tie goes to, or the first one after it

    def pick(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int], scores: Floats,
        tie: float = 0.0,
    ) -> Decision | None:  # fmt: skip
        """The best by `scores`; within `tie` of it the one with the fewest streams, then by
        turns."""
        eligible, reason = self._eligible(fleet, request, exclude)
        if eligible is None:
            return None
        masked = np.where(eligible, scores, np.inf)
        best = masked[masked.argmin()]
        if best == np.inf:
            return None
        limit = best + min(tie * best, TIE_SECONDS_MAX)
        load = np.where(masked <= limit, fleet.running_requests, np.inf)
        engine = self._by_turns(load == load[load.argmin()])
        score = float(masked[engine])
        masked[engine] = np.inf
        second = int(masked.argmin())
        runner_up = second if masked[second] != np.inf else None
        self._next = engine + 1
        return Decision(engine, score, runner_up, reason)

    def _eligible(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int]
    ) -> tuple[Bools | None, str]:
        eligible = fleet.accepts
        if exclude or request.domain is not None:
            eligible = eligible.copy()
            for engine in exclude:
                if 0 <= engine < fleet.engines:
                    eligible[engine] = False
            if request.domain is not None:
                eligible &= fleet.domain == request.domain
        healthy = eligible & ~fleet.suspect
        if healthy.any():
            return healthy, self._name
        if eligible.any():
            return eligible, self._name + ":suspect"
        return None, ""

    def _by_turns(self, tied: Bools) -> int:
        after = tied[self._next :]
        offset = int(after.argmax()) if after.size else 0
        if after.size and after[offset]:
            return self._next + offset
        return int(tied.argmax())
