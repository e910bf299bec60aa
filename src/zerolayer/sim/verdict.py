"""Where our policy stands in a cell: the two tails that it promises to be best at."""

from collections.abc import Sequence
from dataclasses import dataclass

from zerolayer.sim.statistics import Cell, Estimate, PolicyFigures, Standing, ratio_of, standings

OURS = "zerolayer"
"""The policy that the verdict is about."""
PROMISED = (("e2e_s", 0.999), ("worst_gap_s", 0.999))
"""Measures and quantiles of the promise: lowest, or within the interval of the lowest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One measure in one cell. Without our policy or without others there is none."""

    cell: Cell
    measure: str
    share: float
    standing: Standing
    ours: Estimate
    best_other: str
    other: Estimate
    ratio: Estimate
    """Ours over the best other, over draws in step; its interval above 1: ours is slower."""


def verdicts(cell: Cell, figures: Sequence[PolicyFigures]) -> list[Verdict]:
    """One per promise; empty where there is nothing to compare."""
    names = [row.policy for row in figures]
    if OURS not in names or len(names) < 2:
        return []
    found = []
    for measure, share in PROMISED:
        estimates = [row.quantile(measure, share) for row in figures]
        rows = dict(zip(names, figures, strict=True))
        at = names.index(OURS)
        other = best_other(figures, measure, share)
        found.append(
            Verdict(
                cell,
                measure,
                share,
                standings(estimates)[at],
                estimates[at],
                other,
                rows[other].quantile(measure, share),
                ratio_of(rows[OURS], rows[other], measure, share),
            )
        )
    return found


def best_other(
    figures: Sequence[PolicyFigures], measure: str = "e2e_s", share: float = 0.999
) -> str:
    """The policy with the lowest quantile that is not ours; ours where there is no other."""
    others = [row for row in figures if row.policy != OURS] or list(figures)
    return min(others, key=lambda row: row.quantile(measure, share).value).policy
