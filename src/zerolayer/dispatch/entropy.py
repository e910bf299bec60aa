"""The entropy objective: how uneven the fleet will be if the request goes to engine i (P2).

    E = w1 * std(util) + w2 * std(mem) + w3 * cov(link, util)        w = (0.6, 0.3, 0.1)

over the M engines of one domain that accept streams; std and cov divide by M.

**util** of a vLLM engine is the share of its compute capacity in demand (`dispatch.load`), mean
over the next 5 s. Not the GPU utilisation of nvidia-smi: that is the share of time in which
any kernel ran, 100 % with one stream or with two hundred. With NVML the share of time that other
programs take from the engine is in it (`dispatch.neighbours`); without, the figure is ours alone.
**mem** is the share of KV tokens in use or expected to be (vLLM's block pool, not device memory:
vLLM takes that at start and never gives it back); NVML does not change it. **link** (the source's
`bw`) is `fleet.link_use`: the share that the snapshots we save and load take of their path, or with
NVML that of all PCIe traffic where this is more; 0 where neither is known, and then the third term
is 0.

**Why the new value, not abs(new - current)** as the source has it: a placement that makes the fleet
much more even changes E by a lot, so the absolute difference punishes exactly the best choice, and
prefers the one that leaves things as they are. The new value is what evenness means. The source's
form stays here (`Variant.SOURCE`) for comparison.

**Squares.** What the policy `zerolayer` makes small is E with each standard deviation squared, as
the covariance is a square already, and held to a target:

    Q = w1 * (var(util) + mean(util)^2) + w2 * (var(mem) + mean(mem)^2) + w3 * cov(link, util)

where an engine with twice the places (`FleetState.size`) counts as two engines in var and mean.
Among equal engines and placements that add the same to each, Q orders as E does where mem and link
are equal. Three things are better about it. (1) Its slope: that of std is c_i / std, so the more
even a fleet is, the more a difference counts, up to infinity, and a weight beside other terms means
nothing; that of Q is 2 * u_i. (2) The mean: what a request adds differs by engine, where its prefix
is held or where prefill is fast, and E alone likes waste, as a lightly loaded engine is evened up
more by a dearer placement. With mean^2 the sum is held to the least that candidates reach, and one
weight says what a second of work costs on an engine: twice its utilisation. (3) var + mean^2 is the
mean of squares, so engines can be looked at one by one.
Taking the least added sum of squares has a proven bound for jobs that come one after the other and
end nobody knows when, as streams do: within 1.5 of the best placement in hindsight on equal engines
(Azar, Epstein, Epstein, "Load balancing of temporary tasks in the lp norm", 2004).

**util in [0.3, 0.95].** Above 0.95 is a wall: such a candidate is left out while another one is
feasible; when none is, the least bad one is taken or the request is refused (`Limits`). Below 0.3
is no wall: at night every engine is there. By default such engines are filled first, which is what
the deviation wants anyhow; for cost-optimal requests they are filled last (`policies.zerolayer`),
so that they run empty and can be scaled away.

**Closed form.** With c = util - mean(util), d what the request adds to engine i, and b, e the same
of link:

    M var_i = sum(c^2) + 2 c_i d_i + d_i^2 (1 - 1/M)
    M cov_i = sum(b c) + b_i d_i + c_i e_i + e_i d_i (1 - 1/M)
    M (var + mean^2)_i = sum(K u^2) + K_i (2 u_i d_i + d_i^2)          K: FleetState.size

so all M candidates cost O(M), with sums over centred values that do not cancel.

**e is taken as 0 in decisions** (`of_placement`; `change` can take it). It
would be the prompt's tokens to compute * KV bytes of a token / bytes that the link moves in the
window; boards do not say the bytes of a token. Tried with assumed ones (128 KiB at 20 GB/s, so
1.3e-6 of the window a token, up to three times as much on slower links) and prompts of up to 16,000
tokens, it changed 2 of 1,200 choices among 8 engines and 4 among 64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.dispatch.policies.base import holds_any


class Variant(StrEnum):
    """Which figure is minimised."""

    NEW = "new"
    SOURCE = "source"
    """abs(new - current)."""


@dataclass(frozen=True, slots=True)
class EntropyWeights:
    """Weights of the objective, all in utilisation."""

    util: float = 0.6
    mem: float = 0.3
    link: float = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a placement must keep to while a candidate can."""

    util_max: float = 0.95
    """Utilisation of the engine after the placement."""
    mem_max: float = 0.95
    """Share of its KV after the placement: above it vLLM soon pushes streams out."""
    util_min: float = 0.3
    """Below it an engine is idle (see the module's docstring)."""
    util_target: float = 0.7
    """Utilisation up to which cost-optimal requests fill an engine before the next one."""


SOURCE_WEIGHTS = EntropyWeights()
"""The objective as in the source."""


def of_placement(
    fleet: FleetState,
    state: Floats,
    added: Floats,
    domain: int | None,
    weights: EntropyWeights = SOURCE_WEIGHTS,
) -> Floats:
    """`change` within each engine's own domain, over its engines that accept streams.

    `domain`: the only one whose engines are candidates, or None. Engines that do not accept
    have no meaningful value.
    """
    links = (fleet.link_use, None)
    result = np.zeros(fleet.engines)
    for members in _domains(fleet, domain):
        np.copyto(result, change(state, added, links, members, weights), where=members)
    return result


def change(
    state: Floats,
    added: Floats,
    links: tuple[Floats, Floats | None],
    members: Bools,
    weights: EntropyWeights = SOURCE_WEIGHTS,
) -> Floats:
    """E after minus E now, for the request on each engine. Shape `(engines,)`.

    `state`, `added`: shape `(2, engines)`, utilisation and memory. `links`: link use, and what
    the request adds to it (None for nothing). `members`: engines that count; the
    result means something for these only.
    """
    count = max(1, int(np.count_nonzero(members)))
    left = 1.0 - 1.0 / count
    centred = _centred(state, members)
    now = np.square(centred).sum(axis=1)
    after = now[:, None] + (2.0 * centred + left * added) * added
    roots = np.sqrt(np.maximum(after, 0.0)) - np.sqrt(now)[:, None]
    factors = np.array((weights.util, weights.mem)) / count**0.5
    link, link_added = links
    covariance = _centred(link, members) * added[0]
    if link_added is not None:
        covariance += (centred[0] + left * added[0]) * link_added
    result: Floats = factors.dot(roots) + weights.link / count * covariance
    return result


class Squares:
    """M * (Q after - Q now): the weighted sum of squares that a request adds. One object per
    policy, as it keeps its arrays."""

    def __init__(self, weights: EntropyWeights = SOURCE_WEIGHTS) -> None:
        self._both = np.array((weights.util, weights.mem))
        self._link = weights.link
        self._work: Floats = np.zeros((2, 0))

    def of_placement(
        self, fleet: FleetState, state: Floats, added: Floats, domain: int | None
    ) -> Floats:
        """For the request on each engine, shape `(engines,)`. Arguments as `of_placement` above."""
        if self._work.shape != state.shape:
            self._work = np.zeros_like(state)
        work = self._work
        np.add(state, state, out=work)
        work += added
        work *= added
        result: Floats = self._both.dot(work)
        result *= fleet.size
        link = fleet.link_use
        if self._link and link.dot(link) > 0.0:
            for members in _domains(fleet, domain):
                by_link = _centred(link, members)
                by_link *= added[0]
                by_link *= self._link
                result += by_link
        return result


def entropy_of(
    util: Floats, mem: Floats, link: Floats, weights: EntropyWeights = SOURCE_WEIGHTS
) -> float:
    """E of a fleet as it stands; arrays of the engines that count. 0 for none."""
    if util.size == 0:
        return 0.0
    covariance = float(np.mean((link - link.mean()) * (util - util.mean())))
    return float(weights.util * util.std() + weights.mem * mem.std() + weights.link * covariance)


def within_limits(among: Bools, after: Floats, limits: Limits) -> Bools | None:
    """Engines of `among` within both limits after the placement; None when there is none.

    `after`: utilisation and memory with the request, shape `(2, engines)`.
    """
    if after.item(after.argmax()) <= min(limits.util_max, limits.mem_max):
        return among
    util, mem = after
    within: Bools = util <= limits.util_max
    within &= mem <= limits.mem_max
    within &= among
    return within if holds_any(within) else None


def _domains(fleet: FleetState, domain: int | None) -> Iterator[Bools]:
    """The engines of each domain that accept streams, where there are any."""
    if domain is None and fleet.one_domain:
        yield fleet.accepts
        return
    for number in set(fleet.domain.tolist()) if domain is None else (domain,):
        members = fleet.accepts & (fleet.domain == number)
        if holds_any(members):
            yield members


def _centred(values: Floats, members: Bools) -> Floats:
    """Values less their mean over the members, 0 for those who are none."""
    mean = values.dot(members) / max(1, np.count_nonzero(members))
    centred: Floats = values - (mean if values.ndim == 1 else mean[:, None])
    centred *= members
    return centred
