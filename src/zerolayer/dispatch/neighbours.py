"""What other programs on an engine's GPU take from it, in terms of utilisation.

An engine's utilisation u is measured against what it gets: the seconds of prefill in it are learned
from its own steps, which get longer by themselves where a neighbour takes time. With f the share of
the GPU's time that neighbours can take (`FleetState.foreign_util`), the share in demand by anybody:

    u' = f + (1 - f) * u        and a request that adds d to u adds (1 - f) * d to u'

Not u + f: that would count the stretched prefill and the neighbour that stretches it. An engine
that is full (u = 1) stays at 1, and without a neighbour u' = u.
"""

from zerolayer.core.fleet_state import FleetState, Floats


def beside_neighbours(fleet: FleetState, util: Floats) -> None:
    """u -> u' in place; `util` has shape (engines,) or (engines, windows)."""
    if fleet.has_neighbours:
        foreign = fleet.foreign_util if util.ndim == 1 else fleet.foreign_util[:, None]
        util += foreign * (1.0 - util)


def added_beside_neighbours(fleet: FleetState, added: Floats) -> None:
    """d -> (1 - f) * d in place; `added` has shape (engines,)."""
    if fleet.has_neighbours:
        added *= 1.0 - fleet.foreign_util
