"""What every policy gets, gives back and shares: eligibility and fair ties.

Every policy takes the engines that accept, leaves out the excluded ones and other domains, and uses
suspect engines only when no other is left. They differ in what they then hold against an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats

TIE_SECONDS_MAX = 0.05
"""However long the waits are, more than this many seconds apart is not the same."""
SAME_SCORE = 1e-12
"""Scores this close are equal: what is between them is rounding."""


class Preference(StrEnum):
    """What a client asks of the placement (`dispatch.preference` reads it from headers)."""

    BALANCED = "balanced"
    """The fleet's even load and this request's wait, by the tuned weights: what happens without a
    header."""
    LOW_LATENCY = "low-latency"
    """This request's first token and token pace count more than the fleet."""
    HIGH_THROUGHPUT = "high-throughput"
    """Work saved by prefix hits counts more than this request's wait."""
    COST_OPTIMAL = "cost-optimal"
    """Busy engines are filled up to the target first, so that idle ones can be scaled away."""


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
    preference: Preference = Preference.BALANCED
    preferred_domains: frozenset[int] = frozenset()
    """Domains that a hint asks for: theirs come first while they can take it. Empty for any."""
    contiguous: bool = False
    """KV memory in one piece is preferred."""
    refusable: bool = False
    """Admission control: it may be refused when every engine would be overloaded. Never set for a
    stream that runs already."""
    continuing: bool = False
    """Its client has tokens of it already, so that a wait is a pause within an answer."""
    explain: bool = False
    """Put the parts of the score into the decision."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen engine and why."""

    engine: int
    score: float
    """The policy's figure for it; smaller is better. Seconds for ExpectedWait and ZeroLayer."""
    runner_up: int | None
    """The engine that would come next; None when there was one candidate."""
    reason: str
    """Policy name; `:suspect` when only suspect engines were left, `:hot` when only hot ones,
    `:overload` when each would be overloaded."""
    parts: Mapping[str, float] | None = None
    """What the score is made of, where the request asked for it."""


class Policy(Protocol):
    """One way to choose."""

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int]
    ) -> Decision | None:
        """The engine for `request`, or None when none may take it. Changes nothing in `fleet`."""
        ...


def eligible_engines(
    fleet: FleetState, request: PlacementRequest, exclude: frozenset[int]
) -> tuple[Bools | None, str]:
    """Engines that may take `request` (None when there is none), and `:suspect` when only suspect
    ones may. The array may be the fleet's own: do not write into it."""
    eligible = fleet.accepts
    if exclude or request.domain is not None:
        eligible = eligible.copy()
        for engine in exclude:
            if 0 <= engine < fleet.engines:
                eligible[engine] = False
        if request.domain is not None:
            eligible &= fleet.domain == request.domain
    healthy = eligible & ~fleet.suspect
    if holds_any(healthy):
        return healthy, ""
    if holds_any(eligible):
        return eligible, ":suspect"
    return None, ""


def holds_any(mask: Bools) -> bool:
    """`mask.any()`, in a third of its time on small arrays."""
    return bool(mask[mask.argmax()])


class Rotation:
    """Fair ties, shared by policies that score. Buffers live as long as the policy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0  # the slot that a tie goes to, or the first one after it

    def pick(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int], scores: Floats,
        tie: float = 0.0,
    ) -> Decision | None:  # fmt: skip
        """The best by `scores`; within `tie` of it the one with the fewest streams, then by
        turns."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        return self.pick_among(fleet, eligible, scores, tie, suffix)

    def pick_among(
        self, fleet: FleetState, among: Bools, scores: Floats, tie: float, suffix: str
    ) -> Decision | None:
        """The same among the engines of `among`; None when no score there is finite."""
        masked = np.where(among, scores, np.inf)
        best = masked[masked.argmin()]
        if best == np.inf:
            return None
        tied = masked <= best + min(tie * abs(best), TIE_SECONDS_MAX) + SAME_SCORE
        if np.count_nonzero(tied) == 1:
            engine = int(tied.argmax())
        else:
            load = np.where(tied, fleet.running_requests, np.inf)
            engine = self._by_turns(load == load[load.argmin()])
        score = float(masked[engine])
        masked[engine] = np.inf
        second = int(masked.argmin())
        runner_up = second if masked[second] != np.inf else None
        self._next = engine + 1
        return Decision(engine, score, runner_up, self._name + suffix)

    def _by_turns(self, tied: Bools) -> int:
        after = tied[self._next :]
        offset = int(after.argmax()) if after.size else 0
        if after.size and after[offset]:
            return self._next + offset
        return int(tied.argmax())
