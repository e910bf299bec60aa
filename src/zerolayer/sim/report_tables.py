"""The tables of a report, as HTML."""

from collections.abc import Callable, Sequence
from html import escape

from zerolayer.sim.series import CellReport
from zerolayer.sim.statistics import QUANTILES, Estimate, PolicyFigures, Standing, standings
from zerolayer.sim.svg import duration
from zerolayer.sim.verdict import OURS, PROMISED, Verdict, verdicts

Show = Callable[[float], str]


def percent(share: float) -> str:
    """A share with as many digits as a rare event needs."""
    if share == 0.0:
        return "0"
    return f"{share:.3%}" if share < 0.01 else f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def _plain(value: float) -> str:
    return f"{value:.3f}"


_QUANTILE_NAMES = tuple(f"P{share * 100:g}" for share in QUANTILES)
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("first token", _QUANTILE_NAMES),
    ("worst pause", _QUANTILE_NAMES),
    ("arrival to last token", _QUANTILE_NAMES),
    ("over 5 s", ("waits", "whole")),
    ("streams", ("broken", "lost")),
    ("fleet", ("evenness", "moves")),
)


def columns(figures: PolicyFigures) -> list[tuple[Estimate, Show]]:
    """What a table shows of a policy, in the order of its columns, and how each is written."""
    seconds = [
        (figures.quantile(measure, share), duration)
        for measure in ("ttft_s", "worst_gap_s", "e2e_s")
        for share in QUANTILES
    ]
    shares = [
        figures.slow_share, figures.slow_e2e_share, figures.broken_share, figures.lost_share,
    ]  # fmt: skip
    return [*seconds, *((share, percent) for share in shares), (figures.evenness, _plain)]


def cell_table(figures: Sequence[PolicyFigures]) -> str:
    """A row per policy, with the best of each column and its equals marked."""
    groups = "".join(
        f'<th class="group" colspan="{len(names)}">{title}</th>' for title, names in _GROUPS
    )
    names = "".join(f"<th>{name}</th>" for _, titles in _GROUPS for name in titles)
    shown = [columns(row) for row in figures]
    marks = [
        standings([row[at][0] for row in shown]) for at in range(len(shown[0]) if shown else 0)
    ]
    lines = []
    for place, row in enumerate(figures):
        cells = "".join(
            _cell(estimate, show, marks[at][place])
            for at, (estimate, show) in enumerate(shown[place])
        )
        kind = ' class="ours"' if row.policy == OURS else ""
        name = f"{escape(row.policy)}<small>{escape(row.continuation)}</small>"
        lines.append(f"<tr{kind}><td>{name}</td>{cells}<td>{row.moves_per_run:,.0f}</td></tr>")
    return (
        '<div class="scroll"><table>'
        f"<tr><th></th>{groups}</tr><tr><th>policy</th>{names}</tr>{''.join(lines)}</table></div>"
    )


def _cell(estimate: Estimate, show: Show, standing: Standing) -> str:
    kinds = [standing.value] if standing is not Standing.BEHIND else []
    kinds += ["thin"] if estimate.thin else []
    ring = "°" if estimate.thin else ""
    interval = f"{show(estimate.low)} – {show(estimate.high)}"
    return (
        f'<td class="{" ".join(kinds)}" title="95 %: {interval}">{show(estimate.value)}{ring}'
        f"<small>{interval}</small></td>"
    )


def verdict_table(cells: Sequence[CellReport]) -> str:
    """Every cell's promise, and whether it is kept."""
    found = [verdict for cell in cells for verdict in verdicts(cell.cell, cell.figures)]
    if not found:
        return ""
    head = (
        "<tr><th>cell</th>"
        + "".join(f'<th class="words">{_promise(*promise)}</th>' for promise in PROMISED)
        + "</tr>"
    )
    lines = []
    for at in range(0, len(found), len(PROMISED)):
        cell = found[at].cell
        title = f"{cell.trace} {cell.utilisation:.0%} {cell.faults}"
        judged = "".join(_verdict(verdict) for verdict in found[at : at + len(PROMISED)])
        lines.append(f"<tr><td>{escape(title)}</td>{judged}</tr>")
    return (
        f"<h2>Where {OURS} stands</h2><p>{escape(verdict_line(found))}</p>"
        f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'
    )


def _promise(measure: str, share: float) -> str:
    titles = {"e2e_s": "arrival to last token", "worst_gap_s": "worst pause"}
    return f"P{share * 100:g} of {titles.get(measure, measure)}"


def _verdict(verdict: Verdict) -> str:
    kind = {Standing.BEST: "best", Standing.WITHIN: "within", Standing.BEHIND: "behind-promise"}
    return (
        f'<td class="words {kind[verdict.standing]}">{duration(verdict.ours.value)} '
        f"({verdict.standing.value})<small>best other: {escape(verdict.best_other)} "
        f"{duration(verdict.other.value)}, {duration(verdict.other.low)} – "
        f"{duration(verdict.other.high)}; ratio {ratio_text(verdict.ratio)}</small></td>"
    )


def ratio_text(ratio: Estimate) -> str:
    """A ratio with its interval."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"


def verdict_line(found: Sequence[Verdict]) -> str:
    """How often the promise is kept, in one sentence."""
    count = dict.fromkeys(Standing, 0)
    for verdict in found:
        count[verdict.standing] += 1
    line = (
        f"Of {len(found)} comparisons (P99.9 of the whole answer and of the worst pause in each "
        f"cell), {OURS} has the lowest figure in {count[Standing.BEST]}, is within the interval of "
        f"the lowest in {count[Standing.WITHIN]}, and is behind in {count[Standing.BEHIND]}"
    )
    behind = [v for v in found if v.standing is Standing.BEHIND]
    where = "; ".join(
        f"{v.cell.trace} {v.cell.utilisation:.0%} {v.cell.faults}: {_promise(v.measure, v.share)}"
        for v in behind
    )
    return f"{line} ({where})." if behind else f"{line}."
