"""One HTML file with everything in it: tables, pictures, and what was assumed.

It loads nothing: style, script and pictures stand in the file, so that it can be mailed, archived
and opened without a network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from zerolayer.sim import charts
from zerolayer.sim.report_tables import cell_table, verdict_table
from zerolayer.sim.series import CellReport, PolicySeries
from zerolayer.sim.statistics import SLOW_S
from zerolayer.sim.verdict import OURS, best_other

OPEN_CELLS_MAX = 2
"""So many cells stand open; of more, each opens with a tap."""
MEASURE_TITLES = {
    "ttft_s": "Time to first token",
    "worst_gap_s": "Worst pause within a stream",
    "e2e_s": "Arrival to last token",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One part of what was assumed."""

    title: str
    text: str
    rows: tuple[tuple[str, ...], ...] = ()
    """Lines of a table, the first one its head; may be empty."""


@dataclass(frozen=True, slots=True)
class About:
    """What the report says of its own making."""

    facts: tuple[tuple[str, str], ...]
    """Name and value, for the head of the page."""
    assumed: tuple[Section, ...]


def html_report(cells: Sequence[CellReport], about: About) -> str:
    """The whole page."""
    parts = [
        "<header><h1>Zero-Layer: placement policies in simulation</h1>",
        _facts(about.facts),
        "</header>",
        verdict_table(cells),
        *(_cell(cell, is_open=len(cells) <= OPEN_CELLS_MAX) for cell in cells),
        _assumed(about.assumed),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Zero-Layer simulation</title><style>{_part('report.css')}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{_part('report.js')}</script></body></html>\n"
    )


def _part(name: str) -> str:
    folder = resources.files("zerolayer.sim") / "data" / "report"
    return (folder / name).read_text(encoding="utf-8")


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = (f"<li><b>{escape(name)}</b>{escape(value)}</li>" for name, value in facts)
    return f'<ul class="facts">{"".join(items)}</ul>'


def cell_title(report: CellReport) -> str:
    """Names a cell in one line."""
    cell = report.cell
    return f"{cell.trace} at {cell.utilisation:.0%}, faults {cell.faults}, {cell.engines} engines"


def faults_line(report: CellReport) -> str:
    """How many faults of each kind there were, in words."""
    return ", ".join(f"{count} {kind}" for kind, count in report.faults.items()) or "none"


def _cell(report: CellReport, *, is_open: bool) -> str:
    peer = best_other(report.figures)
    runs, requests = report.figures[0].runs, report.figures[0].requests
    parts = [
        f"<summary>{escape(cell_title(report))}</summary>",
        f'<p class="soft">{runs} runs of each policy, {requests // max(1, runs):,} requests each '
        f"at {report.requests_per_s:.3g} requests/s over {report.lasted_s:,.0f} s. Faults in all "
        f"runs of a policy together: {escape(faults_line(report))}.</p>",
        cell_table(report.figures),
        "<h3>Tails</h3>",
        '<p class="note">Share of requests (down, logarithmic) that took at least so long (across, '
        f"logarithmic). Left is better. Tap a name to lift its curve; {escape(peer)} is the best "
        "other policy by P99.9 of arrival to last token.</p>",
        _keys(report, peer),
        _tails(report, peer),
        "<h3>P99.9 with its 95 % interval</h3>",
        _intervals(report),
        "<h3>Evenness</h3>",
        '<p class="note">Standard deviation of utilisation over the engines; low is even. '
        "Mean over all seeds.</p>",
        _wide(charts.evenness_chart(report, peer)),
        _heat_maps(report),
        _moves(report),
    ]
    return f'<details class="cell"{" open" if is_open else ""}>{"".join(parts)}</details>'


def _keys(report: CellReport, peer: str) -> str:
    buttons = []
    for figures in report.figures:
        name = figures.policy
        kind = "ours" if name == OURS else "peer" if name == peer else ""
        buttons.append(
            f'<button type="button" class="{kind}" data-key="{escape(name)}" '
            f'aria-pressed="false">{escape(name)}</button>'
        )
    return f'<div class="keys">{"".join(buttons)}</div>'


def _figure(title: str, picture: str) -> str:
    return f"<figure><b>{escape(title)}</b>{picture}</figure>"


def _tails(report: CellReport, peer: str) -> str:
    figures = (
        _figure(title, charts.tail_chart(report, measure, peer))
        for measure, title in MEASURE_TITLES.items()
    )
    return f'<div class="grid3">{"".join(figures)}</div>'


def _intervals(report: CellReport) -> str:
    names = [figures.policy for figures in report.figures]
    pictures = []
    for measure, title in MEASURE_TITLES.items():
        estimates = [figures.quantile(measure, 0.999) for figures in report.figures]
        peer = best_other(report.figures, measure)
        pictures.append(_figure(title, charts.interval_chart(names, estimates, peer)))
    return f'<div class="grid3">{"".join(pictures)}</div>'


def _wide(picture: str) -> str:
    return f'<figure><div class="wide-scroll">{picture}</div></figure>'


def _heat_maps(report: CellReport) -> str:
    maps = []
    for figures, series in zip(report.figures, report.series, strict=True):
        title = f"{figures.policy}: utilisation of each engine over time"
        picture = charts.heat_map(series, title) + charts.moves_strip(series)
        moved = f", {series.moves_total:,} moves" if series.moves_total else ""
        maps.append(_figure(f"{figures.policy}{moved}", picture))
    return (
        "<h3>Load over time</h3>"
        '<p class="note">First seed. An engine per line, time from left to right; frames are '
        "faults, bars below are moves of streams. Dark: the engine is down.</p>"
        f'{_heat_scale(report.series)}<div class="maps">{"".join(maps)}</div>'
    )


def _heat_scale(series: Sequence[PolicySeries]) -> str:
    edges = (0.0, *charts.HEAT_EDGES)
    steps = "".join(
        f'<span style="border-color:var(--q{level})">{edge:.0%}</span>'
        for level, edge in enumerate(edges)
    )
    kinds = sorted({str(fault["kind"]) for one in series for fault in one.faults})
    return (
        f'<div class="scale">{steps}<span class="key">from this utilisation on; faults: '
        f"{escape(', '.join(kinds) or 'none')}</span></div>"
    )


def _moves(report: CellReport) -> str:
    moving = [
        (figures.policy, series)
        for figures, series in zip(report.figures, report.series, strict=True)
        if series.moves_total
    ]
    if not moving:
        return ""
    ours = [pair for pair in moving if pair[0] == OURS]
    name, series = ours[0] if ours else max(moving, key=lambda pair: pair[1].moves_total)
    shown, total = len(series.moves), series.moves_total
    thinned = "" if shown == total else f" {shown:,} of {total:,} moves are drawn."
    return (
        f"<h3>Moves of {escape(name)}</h3>"
        '<p class="note">First seed. Bars are faults (red: gone or hung, violet: frozen, amber: '
        "slow), lines go from the engine that a stream left to the dot at the one that it came to."
        f"{thinned}</p>{_wide(charts.moves_chart(series))}"
    )


def _assumed(sections: Iterable[Section]) -> str:
    parts = [
        "<h2>How to read the figures</h2>",
        "<p>Quantiles are nearest ranks over all requests of all seeds; small figures and bars are "
        "95 % intervals of a block bootstrap over seeds and requests. A lost request counts as "
        f"infinitely late. “Waits over {SLOW_S:g} s” counts requests whose first token or any "
        "later one kept the client waiting so long. Figures with a ring (°) rest on fewer than "
        "five requests beyond them. Green is the best of a column, grey is within the "
        "interval of the best. A ratio (ours over the best other) has the interval of draws in "
        "step: both met the same requests and faults, so it tells smaller differences apart.</p>",
        "<h2>What was assumed</h2>",
    ]
    for section in sections:
        parts.append(f"<h3>{escape(section.title)}</h3><p>{escape(section.text)}</p>")
        if section.rows:
            parts.append(_rows(section.rows))
    return "".join(parts)


def _rows(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="words">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f'<td class="words">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[1:]
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
