"""The entropy objective: how uneven the fleet will be if the request goes to engine i (P2).

    E = w1 * std(util) + w2 * std(mem) + w3 * cov(link, util)        w = (0.6, 0.3, 0.1)

over the M engines of one domain that accept streams; std and cov divide by M.

**util** of a vLLM engine is the share of its compute capacity in demand (`dispatch.load`), mean of
the forecast's next 5 s. Not the GPU utilisation of nvidia-smi: that is the share of time in which
any kernel ran, 100 % with one stream or with two hundred. With NVML (or DCGM) the hardware's figure
joins as `fleet.util_measured` and the larger of both counts, which catches load that is not ours;
without it, the figure is ours alone. **mem** is the share of KV tokens in use or expected to be
(vLLM's block pool, not device memory: vLLM takes that at start and never gives it back); NVML does
not change it. **link** (the source's `bw`) is `fleet.link_use`, the share of snapshot and PCIe
traffic: with NVML or DCGM from their counters, without from the bytes of snapshots that we write
ourselves; 0 where neither is known, and then the third term is 0.

**Expected state.** The mean of the five columns is taken first, then the deviation over engines.
The other order would also see engines that are busy in different seconds; but a stream lasts longer
than that, and the order taken costs a fifth.

**Why the new value, not abs(new - current)** as the source has it: a placement that makes the fleet
much more even changes E by a lot, so the absolute difference punishes exactly the best choice, and
prefers the one that leaves things as they are. The new value is what evenness means. The source's
form stays here (`Variant.SOURCE`) for comparison.

**sum(util) held to the target.** A request costs less where its prefix is held or where prefill is
fast, so sum(util) after the placement differs by engine. E alone likes waste: a lightly loaded
engine is evened up more by a dearer placement. So the least sum that a candidate reaches is the
target, and what an engine adds beyond it is charged: w4 * (d_i - min d), `total` in the weights.

**util in [0.3, 0.95].** Above 0.95 is a wall: such a candidate is left out while another one is
feasible; when none is, the least bad one is taken or the request is refused (`Limits`). Below 0.3
is no wall: at night every engine is there. By default such engines are filled first, which is what
the deviation wants anyhow; for cost-optimal requests they are filled last (`policies.zerolayer`),
so that they run empty and can be scaled away.

**Closed form.** With c = util - mean(util) and d what the request adds to engine i:

    M var_i = sum(c^2) + 2 c_i d_i + d_i^2 (1 - 1/M)
    M cov_i = sum(b c) + b_i d_i + c_i e_i + e_i d_i (1 - 1/M)       b, e: the same of link

so all M candidates cost O(M), with sums over centred values that do not cancel.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.dispatch.load import fleet_is_one_domain
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
    total: float = 0.1
    """Of the utilisation that an engine adds to the sum beyond what the cheapest one would."""


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


SOURCE_WEIGHTS = EntropyWeights(total=0.0)
"""The objective exactly as in the source."""


class Entropy:
    """The closed form, with buffers that live as long as it. One object per policy."""

    def __init__(self, weights: EntropyWeights) -> None:
        self._weights = weights
        self._std_weights = np.array((weights.util, weights.mem))
        self._engines = 0

    def of_placement(
        self,
        fleet: FleetState,
        state: Floats,
        added: Floats,
        domain: int | None,
        link_added: Floats | None = None,
    ) -> Floats:
        """`change` within each engine's own domain, over its engines that accept streams.

        `domain`: the only one whose engines are candidates, or None. Engines that do not accept
        have no meaningful value.
        """
        links = (fleet.link_use, link_added)
        if domain is None and fleet_is_one_domain(fleet):
            return self.change(state, added, links, fleet.accepts)
        result = np.zeros(fleet.engines)
        domains = set(fleet.domain.tolist()) if domain is None else (domain,)
        for number in domains:
            members = fleet.accepts & (fleet.domain == number)
            if holds_any(members):
                np.copyto(result, self.change(state, added, links, members), where=members)
        return result

    def change(
        self, state: Floats, added: Floats, links: tuple[Floats, Floats | None], members: Bools
    ) -> Floats:
        """E after minus E now, for the request on each engine. Shape `(engines,)`.

        `state`, `added`: shape `(2, engines)`, utilisation and memory. `links`: link use, and what
        the request adds to it (None for nothing). `members`: engines that count, at least one; the
        result means something for these only. It is a buffer that the next call overwrites. The
        total term is not in it: that needs to know the candidates (`waste`).
        """
        centred, work, weight = self._buffers(members.size)
        np.copyto(weight, members)
        count = weight.dot(weight)
        own_share = 1.0 - 1.0 / count
        mean = state.dot(weight)
        mean /= count
        np.subtract(state, mean[:, None], out=centred)
        centred *= weight
        np.multiply(centred, centred, out=work)
        square_sum = work.dot(weight)
        np.multiply(added, own_share, out=work)
        work += centred
        work += centred
        work *= added
        work += square_sum[:, None]
        np.maximum(work, 0.0, out=work)
        work /= count
        np.sqrt(work, out=work)
        result: Floats = self._std_weights.dot(work)
        square_sum /= count
        result -= self._std_weights.dot(np.sqrt(square_sum, out=square_sum))
        if self._weights.link:
            self._add_link(result, centred[0], added[0], links, count)
        return result

    def _add_link(
        self,
        result: Floats,
        centred: Floats,
        added: Floats,
        links: tuple[Floats, Floats | None],
        count: float,
    ) -> None:
        """w3 * (cov after - cov now); the sum over today's products cancels."""
        link, link_added = links
        if link_added is None and link.dot(link) == 0.0:
            return
        change = link - link.dot(self._weight) / count
        if link_added is None:
            change *= added
        else:
            change += link_added * (1.0 - 1.0 / count)
            change *= added
            change += centred * link_added
        change *= self._weights.link / count
        result += change

    def _buffers(self, engines: int) -> tuple[Floats, Floats, Floats]:
        if engines != self._engines:
            self._engines = engines
            self._centred = np.zeros((2, engines))
            self._work = np.zeros((2, engines))
            self._weight = np.zeros(engines)
        return self._centred, self._work, self._weight


def entropy_of(
    util: Floats, mem: Floats, link: Floats, weights: EntropyWeights = SOURCE_WEIGHTS
) -> float:
    """E of a fleet as it stands; arrays of the engines that count. 0 for none."""
    if util.size == 0:
        return 0.0
    covariance = float(np.mean((link - link.mean()) * (util - util.mean())))
    return float(weights.util * util.std() + weights.mem * mem.std() + weights.link * covariance)


def feasible_engines(state: Floats, added: Floats, limits: Limits) -> Bools:
    """Engines within both limits after the placement. `state`, `added`: shape `(2, engines)`."""
    after = state + added
    within: Bools = after[0] <= limits.util_max
    within &= after[1] <= limits.mem_max
    return within


def waste(added_util: Floats, among: Bools) -> Floats:
    """What each engine adds to sum(util) beyond the cheapest of `among`; 0 for those below."""
    masked = np.where(among, added_util, np.inf)
    beyond: Floats = np.maximum(added_util - masked[masked.argmin()], 0.0)
    return beyond
