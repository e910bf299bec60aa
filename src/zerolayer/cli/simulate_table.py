"""A cell of a simulation as a table for people, and the verdict below it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from zerolayer.sim.report import cell_title, faults_line
from zerolayer.sim.report_tables import percent, verdict_line
from zerolayer.sim.series import CellReport
from zerolayer.sim.statistics import Estimate, PolicyFigures, Standing, standings
from zerolayer.sim.svg import duration
from zerolayer.sim.verdict import OURS, verdicts

WIDE = 124
"""Columns of a terminal from which everything fits."""
LEGEND = "* best  ~ within the 95 % interval of the best  ° fewer than five requests beyond it"
_MARKS = {Standing.BEST: ("*", "bold green"), Standing.WITHIN: ("~", "green")}


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every policy."""

    title: str
    figure: Callable[[PolicyFigures], Estimate]
    show: Callable[[float], str]
    interval: bool = False
    always: bool = True
    """Also on a narrow terminal."""


def _seconds(title: str, measure: str, share: float, *, interval: bool = False) -> Column:
    always = share == 0.999
    return Column(title, lambda row: row.quantile(measure, share), duration, interval, always)


COLUMNS = (
    _seconds("TTFT\nP50", "ttft_s", 0.5),
    _seconds("TTFT\nP99", "ttft_s", 0.99),
    _seconds("TTFT\nP99.9", "ttft_s", 0.999),
    _seconds("pause\nP99.9", "worst_gap_s", 0.999),
    _seconds("answer\nP50", "e2e_s", 0.5),
    _seconds("answer\nP99", "e2e_s", 0.99),
    _seconds("answer\nP99.9", "e2e_s", 0.999, interval=True),
    _seconds("answer\nP99.99", "e2e_s", 0.9999),
    Column("waits\n> 5 s", lambda row: row.slow_share, percent),
    Column("broken", lambda row: row.broken_share, percent),
    Column("lost", lambda row: row.lost_share, percent),
    Column("std of\nutil", lambda row: row.evenness, lambda value: f"{value:.3f}"),
)


def cell_table(report: CellReport, width: int) -> Table:
    """A row per policy; the best of each column and its equals are marked."""
    wide = width >= WIDE
    columns = [column for column in COLUMNS if column.always or wide]
    table = Table(
        title=f"{cell_title(report)}; happened: {faults_line(report)}", title_justify="left",
        caption=LEGEND, caption_justify="left", box=SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    marked = [standings([c.figure(row) for row in report.figures]) for c in columns]
    for place, row in enumerate(report.figures):
        cells = [
            _cell(column, column.figure(row), marks[place], wide=wide)
            for column, marks in zip(columns, marked, strict=True)
        ]
        table.add_row(Text(row.policy, style="bold" if row.policy == OURS else ""), *cells)
    return table


def _cell(column: Column, estimate: Estimate, standing: Standing, *, wide: bool) -> Text:
    mark, style = _MARKS.get(standing, (" ", ""))
    ring = "°" if estimate.thin else ""
    text = column.show(estimate.value)
    if column.interval and wide:
        text += f" ({column.show(estimate.low)}–{column.show(estimate.high)})"
    return Text(f"{text}{ring}{mark}", style=style)


def verdict_text(reports: Sequence[CellReport]) -> str:
    """Whether ours is the best, in one sentence; empty where there is nothing to compare."""
    found = [verdict for report in reports for verdict in verdicts(report.cell, report.figures)]
    return verdict_line(found) if found else ""
