"""Figures of cells as plain JSON values; an infinite time is null."""

import math
from collections.abc import Sequence
from typing import Any

from zerolayer.sim.series import CellReport
from zerolayer.sim.statistics import MEASURES, QUANTILES, Estimate, PolicyFigures
from zerolayer.sim.verdict import verdicts


def cells_json(reports: Sequence[CellReport]) -> list[dict[str, Any]]:
    """One object per cell."""
    return [_cell(report) for report in reports]


def _cell(report: CellReport) -> dict[str, Any]:
    cell = report.cell
    return {
        "trace": cell.trace,
        "utilisation": cell.utilisation,
        "faults": cell.faults,
        "engines": cell.engines,
        "requests_per_s": _number(report.requests_per_s),
        "lasted_s": _number(report.lasted_s),
        "faults_happened": report.faults,
        "digest": report.digest,
        "policies": [_policy(figures) for figures in report.figures],
        "verdicts": [
            {
                "measure": verdict.measure,
                "share": verdict.share,
                "standing": verdict.standing.value,
                "value": _number(verdict.ours.value),
                "best_other": verdict.best_other,
                "best_other_value": _number(verdict.other.value),
                "ratio": _estimate(verdict.ratio),
            }
            for verdict in verdicts(cell, report.figures)
        ],
    }


def _policy(figures: PolicyFigures) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": figures.policy,
        "continuation": figures.continuation,
        "runs": figures.runs,
        "requests": figures.requests,
    }
    for measure in MEASURES:
        row[measure] = {
            f"p{share * 100:g}": _estimate(estimate)
            for share, estimate in zip(QUANTILES, figures.quantiles[measure], strict=True)
        }
    for name in ("slow_share", "slow_e2e_share", "broken_share", "lost_share", "evenness"):
        row[name] = _estimate(getattr(figures, name))
    return row | {"moves_per_run": _number(figures.moves_per_run)}


def _estimate(estimate: Estimate) -> dict[str, Any]:
    found: dict[str, Any] = {
        "value": _number(estimate.value),
        "low": _number(estimate.low),
        "high": _number(estimate.high),
    }
    return found | {"thin": True} if estimate.thin else found


def _number(value: float) -> float | None:
    """Six digits; None for what is infinite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
