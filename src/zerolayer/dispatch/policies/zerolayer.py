"""Ours: expected seconds, for this stream and those beside it, and the evenness of the fleet.

Score of engine i, in seconds; the smallest wins:

      ttft    * expected seconds to the first token                     (`expected_wait_s`)
    + queue   * seconds of prefill that wait there
    + prefix  * seconds of prefill of its own, after what the engine holds already
    + pace    * expected output tokens * seconds per step there
    + others  * streams there * (its prefill + its expected output tokens * decode seconds)
    + preempt * share of KV past the knee * seconds to compute its context again
    + entropy * WINDOW_S * M * (E after - E now)                        (`dispatch.entropy`)
    + total   * WINDOW_S * utilisation added beyond the cheapest engine
    + pack    * (target - util, or util + target for an engine that would pass the target)

`others` is what streams there lose: each waits once for this prefill, and each of its tokens takes
longer by one more stream in the batch. E is scaled by M, the engines that count, so that a weight
means the same in every fleet: M * dE is near `0.6 * d * (util - mean) / std` for an added d.

Before the score, the set narrows as far as something is left: engines that are not suspect; within
the limits of utilisation and KV (`dispatch.entropy.Limits`; what fits in 95 % of the KV fits into
its free tokens); of a domain that a hint asks for; with free KV in one piece if that is preferred
(`dispatch.memory_fit`); not hot (`dispatch.drain_rule`). When nothing is within the limits, the
score alone decides (the least bad engine), or the request is refused if it may be.
"""

from dataclasses import dataclass, replace

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.dispatch.entropy import Entropy, EntropyWeights, Limits, feasible_engines, waste
from zerolayer.dispatch.load import WINDOW_S, added_by, memory_expected, utilisation_expected
from zerolayer.dispatch.memory_fit import find_best_fit
from zerolayer.dispatch.policies.base import (
    Decision,
    PlacementRequest,
    Preference,
    Rotation,
    eligible_engines,
    holds_any,
)
from zerolayer.dispatch.policies.expected_wait import (
    KV_KNEE,
    expected_wait_s,
    tokens_to_compute,
)
from zerolayer.dispatch.request_cost import decode_places

OBJECTIVE = EntropyWeights()
"""The source's weights inside the objective."""
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What each second counts. `tune` searches these; 0 leaves a term out."""

    ttft: float = 1.0
    """The request's own wait for its first token."""
    queue: float = 0.0
    """Seconds of prefill that wait on the engine: they also delay the next tokens of a stream."""
    prefix: float = 0.0
    """Seconds of its own prefill: saved where its prefix is held."""
    pace: float = 0.1
    """The request's own time per token over its whole answer."""
    others: float = 0.02
    """Seconds that all streams there lose together."""
    preempt: float = 0.0
    """Seconds to compute a context again, by how far KV goes past the knee."""
    entropy: float = 1.0
    """Evenness of the fleet, in seconds of work."""
    total: float = 0.1
    """Work that another engine would not have: the sum of utilisations held to its least."""
    pack: float = 0.0
    """Fullest engine under the target first. Seconds per utilisation; it is meant to outweigh all
    other terms."""
    objective: EntropyWeights = OBJECTIVE
    """Weights inside the entropy objective; its `total` is not used here, the one above is."""

    def preferring(self, preference: Preference) -> "Weights":
        """These weights as a client's preference shifts them."""
        match preference:
            case Preference.LOW_LATENCY:
                return replace(
                    self, ttft=3.0 * self.ttft, queue=self.queue + 1.0, pace=3.0 * self.pace,
                    others=0.3 * self.others, entropy=0.3 * self.entropy,
                )  # fmt: skip
            case Preference.HIGH_THROUGHPUT:
                return replace(
                    self, ttft=0.3 * self.ttft, prefix=self.prefix + 3.0, pace=0.3 * self.pace,
                    preempt=self.preempt + 5.0, entropy=0.3 * self.entropy,
                )  # fmt: skip
            case Preference.COST_OPTIMAL:
                return replace(self, entropy=0.0, pack=self.pack + 100.0)
            case Preference.BALANCED:
                return self


@dataclass(frozen=True, slots=True)
class _Case:
    """One request on every engine."""

    own: Floats  # prompt tokens to compute
    prefill_s: Floats  # the same in seconds
    backlog_s: Floats  # prefill that waits there
    state: Floats  # utilisation and memory expected, shape (2, engines)
    added: Floats  # what the request adds to both


class ZeroLayer:
    """See the module's docstring."""

    def __init__(self, weights: Weights | None = None, limits: Limits | None = None) -> None:
        weights = weights or Weights()
        self._limits = limits or Limits()
        self._weights = {kind: weights.preferring(kind) for kind in Preference}
        self._entropy = Entropy(weights.objective)
        self._rotation = Rotation("zerolayer")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. None also for a `refusable` request when every engine would be overloaded;
        `retry_after_s` then says for how long."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        case = _case(fleet, request)
        among, feasible = self._narrowed(fleet, request, eligible, case)
        if not feasible:
            if request.refusable:
                return None
            suffix += ":overload"
        elif fleet.hot[among.argmax()]:
            suffix += ":hot"
        weights = self._weights[request.preference]
        scores = self._scores(fleet, request, case, weights)
        if weights.total:
            scores += (weights.total * WINDOW_S) * waste(case.added[0], among)
        decision = self._rotation.pick_among(fleet, among, scores, 0.0, suffix)
        if decision is not None and request.explain:
            return replace(decision, parts=self._parts(fleet, request, case, decision.engine))
        return decision

    def retry_after_s(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> float | None:
        """Seconds until the first engine is expected to have a place; None when one has it now, or
        no engine could ever take it.

        What is demanded beyond the limit in the window is seconds of work that must be done first;
        for memory, a stream must end: an answer's time / streams there. Within
        RETRY_AFTER_S_MIN..RETRY_AFTER_S_MAX.
        """
        eligible, _ = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        case = _case(fleet, request)
        if holds_any(eligible & feasible_engines(case.state, case.added, self._limits)):
            return None
        work_s = np.maximum(0.0, case.state[0] + case.added[0] - self._limits.util_max)
        work_s *= WINDOW_S
        full = case.state[1] + case.added[1] > self._limits.mem_max
        answer_s = fleet.expected_step_s * max(1, request.expected_output_tokens)
        ends_s = np.where(full, answer_s / np.maximum(1.0, fleet.running_requests), 0.0)
        wait_s = float(np.maximum(work_s, ends_s)[eligible].min())
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, wait_s))

    def _narrowed(
        self, fleet: FleetState, request: PlacementRequest, eligible: Bools, case: _Case
    ) -> tuple[Bools, bool]:
        """(engines to score, whether they are within the limits)."""
        among = eligible & feasible_engines(case.state, case.added, self._limits)
        feasible = holds_any(among)
        if not feasible:
            among = eligible
        if request.preferred_domains:
            among = _prefer(among, np.isin(fleet.domain, list(request.preferred_domains)))
        if request.contiguous:
            fit = find_best_fit(fleet, request.prompt_tokens, contiguous=True)
            among = _prefer(among, fit.in_one_piece)
        if holds_any(fleet.hot):
            among = _prefer(among, ~fleet.hot)
        return among, feasible

    def _scores(
        self, fleet: FleetState, request: PlacementRequest, case: _Case, weights: Weights
    ) -> Floats:
        """All terms but `total`, which needs the candidates."""
        output = float(max(1, request.expected_output_tokens))
        scores = expected_wait_s(fleet, request)
        scores *= weights.ttft
        if weights.pace:
            scores += fleet.expected_step_s * (weights.pace * output)
        if weights.others:
            scores += weights.others * _others_lose_s(fleet, case, output)
        if weights.queue:
            scores += weights.queue * case.backlog_s
        if weights.prefix:
            scores += weights.prefix * case.prefill_s
        if weights.preempt:
            scores += weights.preempt * _preemption_s(fleet, request, case)
        if weights.entropy:
            change = self._entropy.of_placement(fleet, case.state, case.added, request.domain)
            scores += (weights.entropy * WINDOW_S * np.count_nonzero(fleet.accepts)) * change
        if weights.pack:
            scores += weights.pack * self._fullest_first(case)
        return scores

    def _fullest_first(self, case: _Case) -> Floats:
        """0 for an engine at the target, target for an empty one, more for one that would pass
        it."""
        target = self._limits.util_target
        util = case.state[0]
        passes = util + case.added[0] > target
        order: Floats = np.where(passes, util + target, target - util)
        return order

    def _parts(
        self, fleet: FleetState, request: PlacementRequest, case: _Case, engine: int
    ) -> dict[str, float]:
        """What speaks for the choice in a person's units, for `x-zerolayer-decision`."""
        change = self._entropy.of_placement(fleet, case.state, case.added, request.domain)
        return {
            "wait_s": float(expected_wait_s(fleet, request)[engine]),
            "computed_tokens": float(case.own[engine]),
            "util": float(case.state[0][engine]),
            "util_added": float(case.added[0][engine]),
            "mem": float(case.state[1][engine]),
            "entropy_change": float(change[engine]),
        }


def _case(fleet: FleetState, request: PlacementRequest) -> _Case:
    places = decode_places(fleet)
    own = tokens_to_compute(fleet, request)
    backlog_s = fleet.waiting_tokens * fleet.prefill_s_per_token
    added = added_by(fleet, request, own, backlog_s, places)
    state = np.empty((2, fleet.engines))
    state[0] = utilisation_expected(fleet, places)
    state[1] = memory_expected(fleet)
    both = np.empty((2, fleet.engines))
    both[0], both[1] = added.util, added.mem
    return _Case(own, own * fleet.prefill_s_per_token, backlog_s, state, both)


def _others_lose_s(fleet: FleetState, case: _Case, output: float) -> Floats:
    lost = fleet.decode_s_per_request * output
    lost += case.prefill_s
    lost *= fleet.running_requests
    return lost


def _preemption_s(fleet: FleetState, request: PlacementRequest, case: _Case) -> Floats:
    past = np.clip((case.state[1] + case.added[1] - KV_KNEE) / (1.0 - KV_KNEE), 0.0, 1.0)
    again: Floats = past * (max(1, request.prompt_tokens) * fleet.prefill_s_per_token)
    return again


def _prefer(among: Bools, wanted: Bools) -> Bools:
    """The wanted ones of `among`, or `among` when there are none."""
    both = among & wanted
    return both if holds_any(both) else among
