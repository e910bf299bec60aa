"""The choice of an engine for a new or moved stream.

Every policy takes the engines that accept, leaves out the excluded ones and other domains, and uses
suspect engines only when no other is left. They differ in what they then hold against an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats

TIE_SHARE = 0.1
"""Waits within this share of the shortest are the same: step times are not known better than
that."""
TIE_SECONDS_MAX = 0.05
"""However long the waits are, more than this many seconds apart is not the same."""
KV_KNEE = 0.9
"""KV use from which a new stream is likely to push another one out (vLLM preempts when blocks run
out)."""


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


class _Rotation:
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


class ExpectedWait:
    """The engine from which the first token is expected soonest."""

    def __init__(self) -> None:
        self._rotation = _Rotation("expected_wait")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        waits = expected_wait_s(fleet, request)
        return self._rotation.pick(fleet, request, exclude, waits, tie=TIE_SHARE)


class LeastRequests:
    """The engine with the fewest streams."""

    def __init__(self) -> None:
        self._rotation = _Rotation("least_requests")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        return self._rotation.pick(fleet, request, exclude, fleet.running_requests)


class RoundRobin:
    """Every engine in turn, whatever its load: the yardstick for the others."""

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        for suspects_too in (False, True):
            for turn in range(fleet.engines):
                engine = (self._next + turn) % fleet.engines
                if self._may(fleet, request, engine, suspects_too) and engine not in exclude:
                    self._next = engine + 1
                    reason = "round_robin:suspect" if suspects_too else "round_robin"
                    return Decision(engine, 0.0, None, reason)
        return None

    @staticmethod
    def _may(fleet: FleetState, request: PlacementRequest, engine: int, suspects_too: bool) -> bool:
        in_domain = request.domain is None or fleet.domain[engine] == request.domain
        standing = bool(fleet.accepts[engine]) and (suspects_too or not fleet.suspect[engine])
        return standing and bool(in_domain)


def expected_wait_s(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Expected seconds until the first token of `request`, per engine (shape `(engines,)`).

    step now running (half of it on average) + one step of its own, both slowed by this stream
    + prefill of what waits and of its own prompt
    + a free place in the batch: with s places and r >= s streams, (r - s + 1) of them must end
      first
    + KV pressure: past the knee, streams are pushed out and computed again.
    """
    own = _tokens_to_compute(fleet, request)
    waits: Floats = fleet.running_requests * fleet.decode_s_per_request
    waits += fleet.expected_step_s
    waits *= 1.5
    backlog = fleet.waiting_tokens + own
    backlog *= fleet.prefill_s_per_token
    waits += backlog
    if (fleet.running_requests >= fleet.requests_max).any():
        waits += _place_in_batch_s(fleet, request)
    pressure = fleet.kv_used_fraction + own / fleet.kv_tokens
    if (pressure > KV_KNEE).any():
        over = np.clip((pressure - KV_KNEE) / (1.0 - KV_KNEE), 0.0, None)
        waits += over * (fleet.running_tokens + own) * fleet.prefill_s_per_token
    return waits


def _tokens_to_compute(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Prompt tokens that each engine lacks; at least one, as the last one is always computed."""
    own = np.full(fleet.engines, float(max(1, request.prompt_tokens)))
    for engine, held in (request.held_tokens or {}).items():
        if 0 <= engine < fleet.engines:
            own[engine] = max(1.0, own[engine] - max(0, held))
    return own


def _place_in_batch_s(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Streams end at the rate of places per answer time; the estimate for others is our own
    request's."""
    surplus: Floats = np.clip(fleet.running_requests - fleet.requests_max + 1.0, 0.0, None)
    answer_s = max(1, request.expected_output_tokens) * fleet.expected_step_s
    surplus *= answer_s
    surplus /= fleet.requests_max
    return surplus
