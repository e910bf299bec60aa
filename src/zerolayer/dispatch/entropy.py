"""The entropy objective: how uneven the fleet will be if the request goes to engine i (P2).

    E = w1 * std(util) + w2 * std(mem) + w3 * cov(link, util)        w = (0.6, 0.3, 0.1)

over the M engines of one domain that accept streams; std and cov divide by M.

**util** of a vLLM engine is the share of its compute capacity in demand (`dispatch.load`), mean of
the forecast's next 5 s. Not the GPU utilisation of nvidia-smi: that is the share of time in which
any kernel ran, 100 % with one stream or with two hundred. With NVML the share of time that other
programs take from the engine is in it (`dispatch.neighbours`); without, the figure is ours alone.
**mem** is the share of KV tokens in use or expected to be (vLLM's block pool, not device memory:
vLLM takes that at start and never gives it back); NVML does not change it. **link** (the source's
`bw`) is `fleet.link_use`: the share that the snapshots we save and load take of their path, or with
NVML that of all PCIe traffic where this is more; 0 where neither is known, and then the third term
is 0.

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

**e is taken as 0 in decisions** (`of_placement`; `change` can take it). It would be the prompt's
tokens to compute * KV bytes of a token / bytes that the link moves in the window; boards do not say
the bytes of a token. Tried with assumed ones (128 KiB at 20 GB/s, so 1.3e-6 of the window a token,
up to three times as much on slower links) and prompts of up to 16,000 tokens, it changed 2 of 1,200
choices among 8 engines and 4 among 64, by at most 2.2 ms of score, and took 4 % of each decision's
time (3.6 to 4.0 % at 8, 64 and 256 engines; median of 200 pairs measured in turns).
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
        self._shares: Floats = np.zeros(0)
        self._prepare(0, 0)

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
        if domain is None and fleet.one_domain:
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
        count = max(1, int(np.count_nonzero(members)))
        if (members.size, count) != (self._ones.size, self._count):
            self._prepare(members.size, count)
        scale = 1.0 if scale_per_member is None else scale_per_member * count
        factor = scale * (2.0 / count) ** 0.5
        centred, work = self._centre(state, members), self._work
        # Half of M var is summed up, which saves a pass; its root is put right by the factor.
        np.multiply(centred, centred, out=work)
        util_half, mem_half = work.dot(self._halves).tolist()
        np.multiply(added, self._half_left, out=work)
        work += centred
        work *= added
        self._util_row.fill(util_half)
        self._mem_row.fill(mem_half)
        work += self._pair
        np.maximum(work, self._zeros, out=work)
        np.sqrt(work, out=work)
        weights = self._weights
        self._link_changes(centred[0], added[0], links)
        util, mem = weights.util * factor, weights.mem * factor
        now = util * util_half**0.5 + mem * mem_half**0.5
        sums = np.array((util, mem, weights.link * scale / count, -now))
        result: Floats = sums.dot(self._all)
        if weights.total:
            result += (scale * weights.total) * added[0]
        return result

    def _link_changes(
        self, centred: Floats, added: Floats, links: tuple[Floats, Floats | None]
    ) -> None:
        """M (cov after - cov now) into its row; the sum over today's products cancels.
        `centred`, `added`: of utilisation."""
        (link, link_added), change, mean = links, self._link_row, self._util_row
        if link_added is None and link.dot(link) == 0.0:
            change.fill(0.0)
            return
        mean.fill(link.dot(self._shares))
        np.subtract(link, mean, out=change)
        if link_added is not None:
            change += link_added * (1.0 - 1.0 / self._count)
        change *= added
        if link_added is not None:
            change += centred * link_added

    def _centre(self, state: Floats, members: Bools) -> Floats:
        """The state minus its mean over the members, 0 for those who are none."""
        everyone = self._count == members.size
        self._shares = self._equal if everyone else members / self._count
        util, mem = state.dot(self._shares).tolist()
        self._util_row.fill(util)
        self._mem_row.fill(mem)
        np.subtract(state, self._pair, out=self._centred)
        if not everyone:
            self._centred *= members
        return self._centred

    def _prepare(self, engines: int, count: int) -> None:
        """Room, and what follows from the numbers alone."""
        self._count = count
        self._ones: Floats = np.ones(engines)
        self._halves: Floats = 0.5 * self._ones
        self._equal: Floats = self._ones / max(1, engines)
        self._shares = self._equal
        self._zeros: Floats = np.zeros((2, engines))
        self._centred: Floats = np.zeros((2, engines))
        # A row filled with one number costs less than a column that is broadcast.
        self._pair: Floats = np.zeros((2, engines))
        self._util_row, self._mem_row = self._pair
        self._half_left: Floats = np.full((2, engines), 0.5 - 0.5 / max(1, count))
        self._all: Floats = np.zeros((4, engines))
        self._link_row = self._all[2]
        self._all[3].fill(1.0)
        self._work: Floats = self._all[:2]


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
