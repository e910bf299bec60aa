"""The pictures of a report: tails, intervals, evenness over time, heat maps, moves."""

import itertools
import math
from collections.abc import Sequence
from html import escape

import numpy as np

from zerolayer.core.fleet_state import Floats
from zerolayer.sim.series import CellReport, PolicySeries
from zerolayer.sim.statistics import Estimate
from zerolayer.sim.svg import Frame, Scale, duration, number
from zerolayer.sim.verdict import OURS

WIDTH = 380.0
HEAT_EDGES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05)
"""Utilisation at which a heat map changes its colour; from 0.95 on an engine is too full."""
TAIL_FLOOR = 1e-5
"""The smallest share of requests on the axis of a tail."""
_TAIL_LABELS = ((1.0, "all"), (0.1, "P90"), (0.01, "P99"), (1e-3, "P99.9"), (1e-4, "P99.99"))
_FAULT_ROWS_MIN_PX = 1.5


def tail_chart(report: CellReport, measure: str, peer: str) -> str:
    """1 - F of a measure on two logarithmic axes, a curve per policy."""
    tails = [series.tails[measure] for series in report.series]
    seconds = np.concatenate([x for x, _ in tails])
    seconds = seconds[seconds > 0]
    low, high = (seconds.min(), seconds.max()) if len(seconds) else (0.1, 1.0)
    low = max(low, _reached(tails, 0.75))
    x = Scale(
        10.0 ** math.floor(math.log10(low)), _decade_above(low, high), 44, WIDTH - 20, log=True
    )
    smallest = min(float(y[-1]) if len(y) else 1.0 for _, y in tails)
    y = Scale(max(TAIL_FLOOR, min(0.1, smallest)), 1.0, 196, 10, log=True)
    frame = Frame(x, y, WIDTH, 222)
    shown = [(value, name) for value, name in _TAIL_LABELS if value >= y.low * 0.99]
    body = [frame.axes([(tick, duration(tick)) for tick in x.ticks()], shown), _slow_line(frame)]
    for name, (xs, ys) in _back_to_front(report, tails, peer):
        body.append(frame.line(xs, ys, _classes(name, peer), name, name))
    return frame.svg(body, f"Share of requests that took at least so long: {measure}, per policy")


def _reached(tails: Sequence[tuple[Floats, Floats]], share: float) -> float:
    """Seconds that at least this share of the requests of every policy took."""
    reached = [float(x[y >= share][-1]) for x, y in tails if (y >= share).any()]
    return max(1e-4, min(reached, default=1e-4))


def _decade_above(low: float, high: float) -> float:
    return float(
        max(10.0 ** math.ceil(math.log10(high)), 10.0 ** (math.floor(math.log10(low)) + 1))
    )


def _slow_line(frame: Frame) -> str:
    if not frame.x.low < 5.0 < frame.x.high:
        return ""
    at, top, low = number(frame.x(5.0)), frame.y.stop, number(frame.y.start - 7)
    return (
        f'<path class="mark" d="M{at} {number(frame.y.start)}V{number(top)}"/>'
        f'<text class="tick" x="{number(frame.x(5.0) + 3)}" y="{low}">5 s</text>'
    )


def _back_to_front(
    report: CellReport, tails: Sequence[tuple[Floats, Floats]], peer: str
) -> list[tuple[str, tuple[Floats, Floats]]]:
    """Ours last, so that nothing covers it; the best of the others just before it."""
    named = zip((figures.policy for figures in report.figures), tails, strict=True)
    return sorted(named, key=lambda pair: (pair[0] == OURS, pair[0] == peer))


def _classes(policy: str, peer: str) -> str:
    return "line" + (" ours" if policy == OURS else " peer" if policy == peer else "")


def interval_chart(names: Sequence[str], estimates: Sequence[Estimate], peer: str) -> str:
    """A dot and its 95 % interval per policy, best first. What is never reached has an arrow."""
    rows = sorted(zip(names, estimates, strict=True), key=lambda row: (row[1].value, row[1].high))
    ends = [e for _, row in rows for e in (row.low, row.value, row.high) if 0 < e < math.inf]
    low, high = (min(ends), max(ends)) if ends else (1.0, 2.0)
    x = Scale(low / 1.15, max(high * 1.15, low * 1.5), 132, WIDTH - 12, log=True)
    bottom = 10.0 + 17 * len(rows)
    frame = Frame(x, Scale(0, 1, bottom, 4), WIDTH, bottom + 20)
    body = [frame.axes([(tick, duration(tick)) for tick in _some_ticks(x)], [])]
    for place, (name, estimate) in enumerate(rows):
        body.append(_interval_row(frame, 14.0 + 17 * place, name, estimate, _classes(name, peer)))
    return frame.svg(body, "Estimate and 95 % interval per policy, best first")


def _some_ticks(x: Scale) -> list[float]:
    """Two to five round values on a logarithmic axis that may hold less than a decade."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        decades = range(math.floor(math.log10(x.low)), math.ceil(math.log10(x.high)) + 1)
        values = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in values if x.low <= value <= x.high]
        if len(inside) >= 2:
            return inside[:6]
    return [x.low, x.high]


def _interval_row(frame: Frame, at: float, name: str, estimate: Estimate, classes: str) -> str:
    y, right = number(at), frame.x.stop
    value = right if math.isinf(estimate.value) else float(frame.x(estimate.value))
    low = right if math.isinf(estimate.low) else float(frame.x(estimate.low))
    high = right if math.isinf(estimate.high) else float(frame.x(estimate.high))
    title = (
        f"{name}: {duration(estimate.value)}, 95 % {duration(estimate.low)} to "
        f"{duration(estimate.high)}"
    )
    arrow = f'<text class="tick" x="{number(right - 2)}" y="{y}">›</text>'
    return (
        f'<g class="{classes} row" data-policy="{escape(name)}"><title>{escape(title)}</title>'
        f'<text class="name end" x="{number(frame.x.start - 8)}" y="{y}">{escape(name)}</text>'
        f'<path d="M{number(low)} {y}H{number(high)}"/>'
        f'<circle cx="{number(value)}" cy="{y}" r="3.5"/>'
        f"{arrow if math.isinf(estimate.high) else ''}</g>"
    )


def evenness_chart(report: CellReport, peer: str) -> str:
    """Standard deviation of utilisation over the engines, over time, a curve per policy."""
    tops = [float(np.nanmax(s.spread)) for s in report.series if np.isfinite(s.spread).any()]
    end_s = max(float(series.bins_s[-1]) for series in report.series)
    unit, unit_name = time_unit(end_s)
    x = Scale(0, end_s / unit, 44, 2 * WIDTH - 20)
    y = Scale(0, max([*tops, 0.05]) * 1.05, 156, 8)
    frame = Frame(x, y, 2 * WIDTH, 182)
    axis = [(tick, f"{tick:g} {unit_name}") for tick in x.ticks()]
    body = [frame.axes(axis, [(tick, f"{tick:.2g}") for tick in y.ticks()])]
    curves = [(series.bins_s / unit, series.spread) for series in report.series]
    for name, (xs, ys) in _back_to_front(report, curves, peer):
        body.append(frame.line(xs, ys, _classes(name, peer), name, name))
    return frame.svg(body, "Spread of utilisation over the engines, over time, per policy")


def time_unit(end_s: float) -> tuple[float, str]:
    """Seconds of the unit that an axis up to `end_s` is labelled in, and its name."""
    if end_s > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if end_s > 300 else (1.0, "s")


def heat_map(series: PolicySeries, title: str) -> str:
    """Engines from top to bottom, time from left to right, faults as frames on top of it."""
    engines, bins = series.heat.shape
    levels = np.searchsorted(HEAT_EDGES, np.nan_to_num(series.heat, nan=0.0), side="right")
    levels[np.isnan(series.heat)] = -1
    paths: dict[int, list[str]] = {}
    for engine in range(engines):
        start = 0
        for level, cells in itertools.groupby(levels[engine].tolist()):
            length = len(list(cells))
            paths.setdefault(level, []).append(f"M{start} {engine}.5h{length}")
            start += length
    body = "".join(
        f'<path class="heat {"down" if level < 0 else f"q{level}"}" d="{"".join(parts)}"/>'
        for level, parts in sorted(paths.items())
    )
    return (
        f'<svg class="map" viewBox="0 0 {bins} {engines}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{body}{_fault_frames(series)}</svg>'
    )


def _fault_frames(series: PolicySeries) -> str:
    end_s, bins = float(series.bins_s[-1]), len(series.bins_s)
    parts = []
    for fault in series.faults:
        left = float(fault["at_s"]) / end_s * bins
        width = max(0.6, (float(fault["until_s"]) - float(fault["at_s"])) / end_s * bins)
        if left > bins or fault["engine"] < 0:
            continue
        width = min(width, bins - left)
        parts.append(
            f'<rect class="fault {escape(str(fault["kind"]))}" x="{left:.2f}" '
            f'y="{int(fault["engine"])}.08" width="{width:.2f}" height=".84">'
            f"<title>{escape(fault_title(fault))}</title></rect>"
        )
    return "".join(parts)


def fault_title(fault: np.void) -> str:
    """One line about a fault."""
    lasted_s = float(fault["until_s"]) - float(fault["at_s"])
    return (
        f"{fault['kind']} on engine {fault['engine']} at {float(fault['at_s']):.0f} s for "
        f"{duration(lasted_s)}"
    )


def moves_strip(series: PolicySeries) -> str:
    """How many streams moved in each bin of time, as bars below a heat map."""
    counts = move_counts(series)
    if counts.max(initial=0) == 0:
        return ""
    top = counts.max()
    bars = "".join(f"M{at}.5 {top}v{-count}" for at, count in enumerate(counts.tolist()) if count)
    return (
        f'<svg class="strip" viewBox="0 0 {len(counts)} {top}" preserveAspectRatio="none" '
        f'role="img" aria-label="Moves over time, at most {top} in one step">'
        f'<path d="{bars}"/></svg>'
    )


def move_counts(series: PolicySeries) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Moves per bin of time, scaled up where the series keeps only some of them."""
    place = np.searchsorted(series.bins_s, series.moves["at_s"])
    counts = np.bincount(
        np.minimum(place, len(series.bins_s) - 1), minlength=len(series.bins_s)
    ).astype(np.int64)
    factor = series.moves_total / max(1, len(series.moves))
    scaled: np.ndarray[tuple[int], np.dtype[np.int64]] = np.rint(counts * factor).astype(np.int64)
    return scaled


def moves_chart(series: PolicySeries) -> str:
    """A lane per engine: faults as bars, each move as a line from its source to its target."""
    engines, end_s = series.heat.shape[0], float(series.bins_s[-1])
    unit, unit_name = time_unit(end_s)
    lane = 14.0 if engines <= 24 else 7.0
    bottom = 8 + lane * engines
    x, y = Scale(0, end_s / unit, 44, 2 * WIDTH - 20), Scale(engines, 0, bottom, 8)
    frame = Frame(x, y, 2 * WIDTH, bottom + 24)
    axis = [(tick, f"{tick:g} {unit_name}") for tick in x.ticks()]
    every = max(1, engines // 16)
    rows = [(engine + 0.5, f"e{engine}") for engine in range(0, engines, every)]
    body = [frame.axes(axis, rows)]
    for fault in series.faults[series.faults["engine"] >= 0]:
        left, right = frame.x(np.array([fault["at_s"], fault["until_s"]]) / unit).tolist()
        body.append(
            f'<rect class="bar {escape(str(fault["kind"]))}" x="{left:.1f}" '
            f'y="{float(frame.y(int(fault["engine"]) + 0.12)):.1f}" '
            f'width="{max(_FAULT_ROWS_MIN_PX, right - left):.1f}" height="{lane * 0.76:.1f}">'
            f"<title>{escape(fault_title(fault))}</title></rect>"
        )
    body.append(_move_lines(frame, series, unit))
    return frame.svg(body, "Moves of streams between engines, and faults, over time")


def _move_lines(frame: Frame, series: PolicySeries, unit: float) -> str:
    moves = series.moves[(series.moves["source"] >= 0) & (series.moves["target"] >= 0)]
    xs = frame.x(moves["at_s"] / unit).tolist()
    sources = frame.y(moves["source"] + 0.5).tolist()
    targets = frame.y(moves["target"] + 0.5).tolist()
    lines, dots = [], []
    for x, source, target in zip(xs, sources, targets, strict=True):
        lines.append(f"M{number(x)} {number(source)}V{number(target)}")
        dots.append(f"M{number(x)} {number(target)}h0")
    return f'<path class="move" d="{"".join(lines)}"/><path class="moved" d="{"".join(dots)}"/>'
