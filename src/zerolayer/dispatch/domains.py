"""Scheduling domains (P8): which engines are equal enough to be balanced against each other.

From a census of one row per engine: different devices, link generations or labels are never in one
domain; of those that are alike in all three, those whose speeds lie within 5 % are. Origin: the
source (mission, P8), whose figure is the number of executed instructions.

One figure per engine, larger is faster: instructions executed per second under the same load, or
1 / measured step time of the same step. Spread of a pool: largest / smallest - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SPREAD_MAX = 0.05
"""More than this between two engines means: not in the same pool."""


@dataclass(frozen=True, slots=True)
class CensusRow:
    """One engine as it was measured."""

    device: str
    """Its name as the driver says it, like `NVIDIA H200`."""
    link_generation: int | None = None
    """PCIe generation of its link; None where not known."""
    speed: float | None = None
    """The figure above; None where it was not measured."""
    labels: tuple[str, ...] = ()
    """What its operator calls it, for hints of clients (`dispatch.choices.Domain`)."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the census says."""

    domains: tuple[int, ...]
    """Domain of each engine; 0 is the largest one."""
    reasons: tuple[str, ...]
    """One line per domain: what its engines have in common and how far they spread."""


def propose_domains(census: Sequence[CensusRow], spread_max: float = SPREAD_MAX) -> Proposal:
    """Domains for the engines of `census`, in its order.

    Within equal hardware, the pool with the most engines is taken first, then the next one, so that
    a single slow card is left out and does not split the others. An engine without a figure goes
    to the largest pool of its hardware. Raises ValueError for a negative spread.
    """
    if spread_max < 0.0:
        raise ValueError(f"spread_max must be 0 or more, not {spread_max}")
    kinds: dict[tuple[str, int | None, tuple[str, ...]], list[int]] = {}
    for engine, row in enumerate(census):
        kind = (row.device, row.link_generation, tuple(sorted(row.labels)))
        kinds.setdefault(kind, []).append(engine)
    pools = [pool for members in kinds.values() for pool in _pools(census, members, spread_max)]
    pools.sort(key=lambda pool: (-len(pool), min(pool)))
    domains = [0] * len(census)
    for number, pool in enumerate(pools):
        for engine in pool:
            domains[engine] = number
    reasons = tuple(_reason(census, pool) for pool in pools)
    return Proposal(tuple(domains), reasons)


def _pools(census: Sequence[CensusRow], members: list[int], spread_max: float) -> list[list[int]]:
    speeds = {engine: _speed(census[engine]) for engine in members}
    measured = sorted((e for e in members if speeds[e] > 0.0), key=lambda e: (speeds[e], e))
    pools = []
    while measured:
        first, last = _widest(measured, speeds, spread_max)
        pools.append(measured[first:last])
        del measured[first:last]
    unmeasured = [engine for engine in members if speeds[engine] <= 0.0]
    if pools:
        pools[0] += unmeasured
    elif unmeasured:
        pools.append(unmeasured)
    return pools


def _widest(ordered: list[int], speeds: dict[int, float], spread_max: float) -> tuple[int, int]:
    """Bounds of the slice with the most engines within the spread; of equal ones the fastest.

    What was taken out before lies in one piece outside every slice that is left within the spread,
    so slices over the gap are excluded by their spread alone.
    """
    best, last = (0, 1), 0
    for first in range(len(ordered)):
        last = max(last, first + 1)
        limit = speeds[ordered[first]] * (1.0 + spread_max)
        while last < len(ordered) and speeds[ordered[last]] <= limit:
            last += 1
        if last - first >= best[1] - best[0]:
            best = (first, last)
    return best


def _speed(row: CensusRow) -> float:
    speed = row.speed
    return speed if speed is not None and speed > 0.0 else 0.0


def _reason(census: Sequence[CensusRow], pool: list[int]) -> str:
    any_of_it = census[pool[0]]
    generation = any_of_it.link_generation
    link = f", PCIe {generation}" if generation is not None else ""
    named = f" ({'+'.join(any_of_it.labels)})" if any_of_it.labels else ""
    speeds = [speed for speed in (_speed(census[engine]) for engine in pool) if speed > 0.0]
    spread = f"spread {max(speeds) / min(speeds) - 1.0:.1%}" if speeds else "not measured"
    return f"{len(pool)} x {any_of_it.device}{link}{named}: {spread}"
