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
target, and what an engine adds beyond it is charged: w4 * (d_i - min d). The least is the same
for all candidates, so w4 * d_i chooses the same.

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
    total: float = 0.0
    """w4, of the utilisation that an engine adds to the sum; 0 as in the source."""


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


class Entropy:
    """The closed form, with buffers that live as long as it. One object per policy."""

    def __init__(self, weights: EntropyWeights) -> None:
        self._weights = weights
        self._std_weights = np.array((weights.util, weights.mem))
        self._halves: Floats = np.zeros(0)
        self._equal = self._shares = self._halves
        self._centred = self._work = np.zeros((2, 0))

    def of_placement(
        self,
        fleet: FleetState,
        state: Floats,
        added: Floats,
        domain: int | None,
        scale_per_member: float | None = None,
    ) -> Floats:
        """`change` within each engine's own domain, over its engines that accept streams.

        `domain`: the only one whose engines are candidates, or None. Engines that do not accept
        have no meaningful value. `scale_per_member`: times this and the members of the domain.
        """
        links = (fleet.link_use, None)
        if domain is None and not holds_any(fleet.domain != fleet.domain[0]):
            return self.change(state, added, links, fleet.accepts, scale_per_member)
        result = np.zeros(fleet.engines)
        domains = set(fleet.domain.tolist()) if domain is None else (domain,)
        for number in domains:
            members = fleet.accepts & (fleet.domain == number)
            if holds_any(members):
                change = self.change(state, added, links, members, scale_per_member)
                np.copyto(result, change, where=members)
        return result

    def change(
        self,
        state: Floats,
        added: Floats,
        links: tuple[Floats, Floats | None],
        members: Bools,
        scale_per_member: float | None = None,
    ) -> Floats:
        """E after minus E now, for the request on each engine. Shape `(engines,)`.

        `state`, `added`: shape `(2, engines)`, utilisation and memory. `links`: link use, and what
        the request adds to it (None for nothing). `members`: engines that count; the
        result means something for these only. w4 is part of it. `scale_per_member`: the result
        times this and the number of members.
        """
        count = float(max(1, int(np.count_nonzero(members))))
        scale = 1.0 if scale_per_member is None else scale_per_member * count
        centred = self._centre(state, members, count)
        work = self._work
        # Half of M var is summed up, which saves a pass; its root is put right by the factor.
        np.multiply(centred, centred, out=work)
        half_sums = work.dot(self._halves)
        np.multiply(added, 0.5 - 0.5 / count, out=work)
        work += centred
        work *= added
        work += half_sums[:, None]
        np.maximum(work, 0.0, out=work)
        np.sqrt(work, out=work)
        factor = scale * (2.0 / count) ** 0.5
        result: Floats = (self._std_weights * factor).dot(work)
        util_half, mem_half = half_sums.tolist()
        now = self._weights.util * util_half**0.5 + self._weights.mem * mem_half**0.5
        result -= now * factor
        if self._weights.total:
            result += (scale * self._weights.total) * added[0]
        if self._weights.link:
            self._add_link(result, (centred[0], added[0]), links, scale / count)
        return result

    def _add_link(
        self,
        result: Floats,
        util: tuple[Floats, Floats],
        links: tuple[Floats, Floats | None],
        scale: float,
    ) -> None:
        """w3 * (cov after - cov now); the sum over today's products cancels. `util`: centred, and
        what is added."""
        (link, link_added), (centred, added) = links, util
        if link_added is None and link.dot(link) == 0.0:
            return
        mean = link.dot(self._shares)
        if link_added is None:
            change = link - mean
            change *= added
        else:
            # 1 - 1/M: a member's share of the mean moves with it.
            change = link_added * (1.0 - self._shares.max())
            change += link - mean
            change *= added
            change += centred * link_added
        change *= self._weights.link * scale
        result += change

    def _centre(self, state: Floats, members: Bools, count: float) -> Floats:
        """The state minus its mean over the members, 0 for those who are none."""
        engines = members.size
        if engines != self._halves.size:
            self._halves, self._equal = np.full(engines, 0.5), np.full(engines, 1.0 / engines)
            self._centred, self._work = np.zeros((2, engines)), np.zeros((2, engines))
        everyone = count == engines
        self._shares = self._equal if everyone else members / count
        mean = state.dot(self._shares)
        np.subtract(state, mean[:, None], out=self._centred)
        if not everyone:
            self._centred *= members
        return self._centred


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
    util, mem = after
    if util[util.argmax()] <= limits.util_max and mem[mem.argmax()] <= limits.mem_max:
        return among
    within: Bools = util <= limits.util_max
    within &= mem <= limits.mem_max
    within &= among
    return within if holds_any(within) else None
