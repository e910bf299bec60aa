"""Ours: the evenness of the fleet in squares, and this request's own wait.

Score of engine i, in seconds; the smallest wins:

      ttft    * seconds of prefill before the first token: what waits there, and its own
                (of a stream that goes on: what it and others like it must load, times `resume`)
    + entropy * WINDOW_S * M * (Q after - Q now)                        (`dispatch.entropy`)
    - stay    * seconds of prefill that it saves by what it alone holds * share of the prompt held

and, where a preference asks for it,

    + pace    * expected output tokens * seconds per step without prefill
    + total   * WINDOW_S * utilisation that it adds there
    + pack    * (target - util, or util + target for an engine that would pass the target)

The second term is the core. Its first part is entropy * w1 * WINDOW_S * d * (2 u + d): a second of
work costs in proportion to the utilisation of the engine that it goes to. So a prefix that is held
somewhere draws a request by the work it saves, and the harder the busier the fleet is, and lets go
of it as soon as that engine is busier by more than that.

`stay` keeps conversations together: the next turn finds most of its prompt where the last one ran,
and a copy elsewhere would push other prefixes out. Only what no second engine holds counts, times
the share of the prompt that is held: a system prompt is soon held everywhere, and must not crowd
the engine that had it first.

The steps that pass until the first token (`expected_wait_s` has them) are left out. What engines
of one kind seem to differ by there is mostly error of their learned step times, and a step with
prefill in it is the backlog once more.

Before the score, the set narrows as far as something is left: engines that are not suspect; within
the limits of utilisation and KV (`dispatch.entropy.Limits`; what fits in 95 % of the KV fits into
its free tokens), or, where none of those does, holding half of the prompt or more: elsewhere the
same request is twice the work, and a full fleet gets fuller by it; of a domain that a hint asks
for; with free KV in one piece if that is preferred (`dispatch.memory_fit`); not hot
(`dispatch.drain_rule`). When nothing is within the limits, the score alone decides (the least bad
engine), or the request is refused if it may be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.dispatch.entropy import (
    EntropyWeights,
    Limits,
    Squares,
    of_placement,
    within_limits,
)
from zerolayer.dispatch.load import WINDOW_S, Appraisal
from zerolayer.dispatch.memory_fit import find_best_fit
from zerolayer.dispatch.policies.base import (
    Decision,
    PlacementRequest,
    Preference,
    Rotation,
    eligible_engines,
    holds_any,
)
from zerolayer.dispatch.policies.expected_wait import crowding_s, expected_wait_s

OBJECTIVE = EntropyWeights(0.45, 0.45, 0.1)
"""w1, w2, w3 inside Q. The source's (0.6, 0.3, 0.1) are those of its deviations; with squares,
where memory in use is below utilisation, so is its slope."""
HOLDER_SHARE = 0.5
"""Share of its prompt from which on an engine that holds it is no worse for being over a limit."""
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What each second counts. `tune` searches these; 0 leaves a term out. How the defaults come
    from what it found is in docs/simulator.md."""

    ttft: float = 1.0
    """The request's own wait for its first token."""
    resume: float = 4.0
    """How many times as much that wait counts for a stream that a client is reading already. It
    waits for others of its kind alone: engines take them in before all prompts."""
    entropy: float = 27.0
    """Evenness of the fleet, in seconds of work."""
    stay: float = 40.0
    """Seconds of prefill that a prefix saves which only this engine holds, times the share of the
    prompt that it holds."""
    queue: float = 1.0
    """How much more than its share of the window the prefill that waits counts, in utilisation."""
    pace: float = 0.0
    """The request's own time per token over its whole answer."""
    total: float = 0.0
    """Work that it adds to the sum of utilisations, wherever that is: another engine may have less
    of it."""
    pack: float = 0.0
    """Fullest engine under the target first. Seconds per utilisation; it is meant to outweigh all
    other terms."""
    objective: EntropyWeights = OBJECTIVE
    """Weights inside the entropy objective."""

    def preferring(self, preference: Preference) -> "Weights":
        """These weights as a client's preference shifts them."""
        match preference:
            case Preference.LOW_LATENCY:
                return replace(self, ttft=10.0 * self.ttft, pace=self.pace + 1.0)
            case Preference.HIGH_THROUGHPUT:
                return replace(self, ttft=0.3 * self.ttft, queue=0.0, total=self.total + 20.0)
            case Preference.COST_OPTIMAL:
                return replace(self, entropy=0.0, pack=self.pack + 100.0)
            case Preference.BALANCED:
                return self


class ZeroLayer:
    """See the module's docstring."""

    def __init__(self, weights: Weights | None = None, limits: Limits | None = None) -> None:
        weights = weights or Weights()
        self._limits = limits or Limits()
        self._objective, self._squares = weights.objective, Squares(weights.objective)
        self._weights = {kind: weights.preferring(kind) for kind in Preference}
        self._rotation = Rotation("zerolayer")
        self._case = Appraisal()

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy. None also for a `refusable` request when every engine would be overloaded;
        `retry_after_s` then says for how long."""
        eligible, suffix = eligible_engines(fleet, request, exclude)
        if eligible is None:
            return None
        case = self._case
        case.take(fleet, request)
        if request.refusable and self._is_full(fleet, eligible):
            return None
        among = self._within_limits(fleet, request, eligible)
        if among is None:
            among, suffix = eligible, suffix + ":overload"
        if request.preferred_domains or request.contiguous:
            among = _as_hinted(fleet, request, among)
        if holds_any(fleet.hot):
            among = _prefer(among, ~fleet.hot)
            suffix += ":hot" if fleet.hot[among.argmax()] else ""
        scores = self._scores(fleet, request, case)
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
        case = self._case
        case.take(fleet, request)
        if not self._is_full(fleet, eligible):
            return None
        work_s = np.maximum(0.0, case.after[0] - self._limits.util_max) * WINDOW_S
        answer_s = case.decode_step_s * case.output / np.maximum(1.0, fleet.running_requests)
        ends_s = np.where(case.after[1] > self._limits.mem_max, answer_s, 0.0)
        wait_s = float(np.maximum(work_s, ends_s)[eligible].min())
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, wait_s))

    def _within_limits(
        self, fleet: FleetState, request: PlacementRequest, eligible: Bools
    ) -> Bools | None:
        """Engines that keep the limits for as long as their streams are expected to stay, and,
        where none of them does, those that hold most of the prompt; None when none keeps them. The
        case is left with what is placed now."""
        case = self._case
        case.state_now(fleet)  # as if all stayed: at least as much
        if within_limits(eligible, case.after, self._limits) is eligible:
            return eligible
        case.state_committed(fleet)
        among = within_limits(eligible, case.after, self._limits)
        case.state_now(fleet)
        if among is not None and request.held_tokens:
            _add_holders(among, request.held_tokens, request.prompt_tokens, eligible)
        return among

    def _is_full(self, fleet: FleetState, eligible: Bools) -> bool:
        """Whether the request takes every engine past a limit, with the streams still to come."""
        self._case.state_expected(fleet)
        return within_limits(eligible, self._case.after, self._limits) is None

    def _scores(self, fleet: FleetState, request: PlacementRequest, case: Appraisal) -> Floats:
        weights = self._weights[request.preference]
        state = case.state.copy()
        state[0] += (weights.queue / WINDOW_S) * case.backlog_s
        scores = self._squares.of_placement(fleet, state, case.added, request.domain)
        scores *= weights.entropy * WINDOW_S
        wait, ahead_s = weights.ttft, case.backlog_s
        if request.continuing:
            wait *= weights.resume
            ahead_s = fleet.resuming_tokens * fleet.prefill_s_per_token
        scores += wait * (ahead_s + case.own_s)
        crowding = crowding_s(fleet, request, case.own)
        if crowding is not None:
            scores += wait * crowding
        if weights.stay and request.held_tokens:
            _keep_together(scores, fleet, request.prompt_tokens, request.held_tokens, weights.stay)
        if weights.pace:
            scores += weights.pace * case.output * case.decode_step_s
        if weights.total:
            scores += weights.total * WINDOW_S * case.util_added
        if weights.pack:
            scores += weights.pack * self._fullest_first(case)
        return scores

    def _fullest_first(self, case: Appraisal) -> Floats:
        """0 for an engine at the target, target for an empty one, more for one that would pass
        it."""
        target = self._limits.util_target
        order: Floats = np.where(case.after[0] > target, case.util + target, target - case.util)
        return order

    def _parts(
        self, fleet: FleetState, request: PlacementRequest, case: Appraisal, engine: int
    ) -> dict[str, float]:
        """What speaks for the choice in a person's units, for `x-zerolayer-decision`."""
        case.state_committed(fleet)
        change = of_placement(fleet, case.state, case.added, request.domain, self._objective)
        return {
            "wait_s": float(expected_wait_s(fleet, request)[engine]),
            "computed_tokens": float(case.own[engine]),
            "util": float(case.util[engine]),
            "util_added": float(case.util_added[engine]),
            "mem": float(case.mem[engine]),
            "entropy_change": float(change[engine]),
        }


def _keep_together(
    scores: Floats, fleet: FleetState, prompt: int, held: Mapping[int, int], weight: float
) -> None:
    known = [(tokens, engine) for engine, tokens in held.items() if 0 <= engine < fleet.engines]
    if not known:
        return
    most, engine = max(known)
    next_most = max((tokens for tokens, other in known if other != engine), default=0)
    alone_s = (most - next_most) * fleet.prefill_s_per_token[engine]
    scores[engine] -= weight * alone_s * min(1.0, most / max(1, prompt))


def _add_holders(among: Bools, held: Mapping[int, int], prompt: int, eligible: Bools) -> None:
    """Where none of `among` holds most of the prompt, those who do. A stream that goes on from its
    snapshot is held by all, so for it the limits stay."""
    least = HOLDER_SHARE * prompt
    able = (e for e, tokens in held.items() if 0 <= e < among.size and tokens >= least)
    holders = [engine for engine in able if eligible[engine]]
    if not among[holders].any():
        among[holders] = True


def _as_hinted(fleet: FleetState, request: PlacementRequest, among: Bools) -> Bools:
    if request.preferred_domains:
        among = _prefer(among, np.isin(fleet.domain, list(request.preferred_domains)))
    if request.contiguous:
        fit = find_best_fit(fleet, request.prompt_tokens, contiguous=True)
        among = _prefer(among, fit.in_one_piece)
    return among


def _prefer(among: Bools, wanted: Bools) -> Bools:
    """The wanted ones of `among`, or `among` when there are none."""
    both = among & wanted
    return both if holds_any(both) else among
