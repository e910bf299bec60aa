"""How warm each engine is, and what it adds to the unevenness of its domain.

The objective `E = w1 * std(util) + w2 * std(mem) + w3 * cov(link, util)` (`dispatch.entropy`) is a
sum over engines, as std = sum(c^2) / (M * std) with c = value - mean:

    share_i = w1 * c_i^2 / (M * std(util)) + w2 * m_i^2 / (M * std(mem)) + w3 * b_i * c_i / M

so the shares of a domain add up to its E. An engine has a large one when it is far from the others,
idle or overloaded; in an even fleet all are 0.
"""

from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import FleetState, Floats
from zerolayer.dispatch.entropy import SOURCE_WEIGHTS, EntropyWeights
from zerolayer.dispatch.load import Appraisal
from zerolayer.dispatch.policies.base import PlacementRequest

_NOTHING = PlacementRequest(1)


@dataclass(frozen=True, slots=True)
class Heat:
    """Arrays of shape `(engines,)`."""

    util: Floats
    """Utilisation from what is placed there now."""
    mem: Floats
    """Share of KV in use now."""
    share: Floats
    """Of the domain's E as it is expected in the next seconds; 0 for engines that do not accept."""

    @property
    def objective(self) -> float:
        """E of all domains together."""
        return float(self.share.sum())


def heat_of(fleet: FleetState, weights: EntropyWeights = SOURCE_WEIGHTS) -> Heat:
    """The fleet as it stands."""
    case = Appraisal()
    case.take(fleet, _NOTHING)
    case.state_now(fleet)
    util, mem = case.util.copy(), case.mem.copy()
    case.state_expected(fleet)
    share = np.zeros(fleet.engines)
    for domain in np.unique(fleet.domain):
        members = fleet.accepts & (fleet.domain == domain)
        if members.any():
            share[members] = entropy_shares(
                case.util[members], case.mem[members], fleet.link_use[members], weights
            )
    return Heat(util, mem, share)


def entropy_shares(
    util: Floats, mem: Floats, link: Floats, weights: EntropyWeights = SOURCE_WEIGHTS
) -> Floats:
    """Each engine's share of E; arrays of the engines of one domain, at least one."""
    count = len(util)
    of_util, of_link = util - util.mean(), link - link.mean()
    shares = weights.util * _shares_of_std(util) + weights.mem * _shares_of_std(mem)
    shares += weights.link * of_link * of_util / count
    return shares


def _shares_of_std(values: Floats) -> Floats:
    centred = values - values.mean()
    std = float(np.sqrt(np.mean(centred * centred)))
    if std == 0.0:
        return np.zeros(len(values))
    shares: Floats = centred * centred / (len(values) * std)
    return shares
