import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.unit.sim.synthetic import synthetic_run
from zerolayer.sim.report import About, Section, html_report
from zerolayer.sim.report_tables import percent
from zerolayer.sim.series import CellReport, cell_report, tail_of
from zerolayer.sim.statistics import Standing
from zerolayer.sim.svg import Scale, duration
from zerolayer.sim.verdict import best_other, verdicts

ABOUT = About(
    (("engines", "4 × <h100>"),),
    (Section("Faults", "As in the model.", (("fault", "figure"), ("crash", "1 per day"))),),
)
VOID = {"meta", "br", "circle", "path", "rect"}


class Balance(HTMLParser):
    """Remembers what was opened and not closed, and what was closed and not opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID and (not self.open or self.open[-1] != tag):
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def cell() -> CellReport:
    speeds = {"round_robin": 4.0, "expected_wait": 2.0, "zerolayer": 1.0}
    return cell_report(
        [
            [synthetic_run(name, seed, 400, slowness=slow) for seed in range(2)]
            for name, slow in speeds.items()
        ]
    )


def test_the_page_loads_nothing_from_elsewhere(cell: CellReport) -> None:
    page = html_report([cell], ABOUT)
    assert not re.findall(r"(?:https?:)?//[a-z]", page.replace("// A tap", ""))
    assert not re.findall(r"(?:src|href|@import|url\()\s*=?", page)


def test_the_page_is_well_formed_and_escapes_what_it_is_told(cell: CellReport) -> None:
    page = html_report([cell], ABOUT)
    balance = Balance()
    balance.feed(page)
    assert (balance.wrong, balance.open) == ([], [])
    assert {"svg", "table", "details"} <= balance.seen
    assert "4 × &lt;h100&gt;" in page


def test_the_page_has_no_figure_that_is_no_number(cell: CellReport) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", html_report([cell], ABOUT)))
    assert "nan" not in pictures
    assert "inf" not in pictures


def test_a_page_can_be_made_of_runs_without_faults_moves_or_finished_requests() -> None:
    run = synthetic_run(requests=12, lost=12)
    bare = cell_report([[run], [synthetic_run("random", requests=12, slowness=1e-3)]])
    page = html_report([bare], About((), ()))
    assert "never" in page
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", page))


def test_the_verdict_names_the_best_other_and_where_ours_stands(cell: CellReport) -> None:
    found = verdicts(cell.cell, cell.figures)
    assert [verdict.measure for verdict in found] == ["e2e_s", "worst_gap_s"]
    assert all(verdict.standing is not Standing.BEHIND for verdict in found)
    assert best_other(cell.figures) == "expected_wait"
    assert verdicts(cell.cell, cell.figures[:2]) == []


def test_a_tail_falls_and_leaves_out_what_never_ended() -> None:
    seconds, share = tail_of(np.array([1.0, 2.0, 3.0, np.inf]))
    assert seconds.tolist() == [1.0, 2.0, 3.0]
    assert share.tolist() == [1.0, 0.75, 0.5]


def test_a_logarithmic_scale_has_decades_and_a_straight_one_round_steps() -> None:
    assert Scale(0.01, 10, 0, 90, log=True).ticks() == pytest.approx([0.01, 0.1, 1, 10])
    assert float(Scale(0.01, 10, 0, 90, log=True)(1.0)) == pytest.approx(60)
    assert Scale(0, 60, 0, 1).ticks() == pytest.approx([0, 10, 20, 30, 40, 50, 60])
    assert float(Scale(4, 0, 100, 0)(9.0)) == pytest.approx(100)


def test_people_read_durations_and_shares() -> None:
    assert [duration(s) for s in (0.0123, 1.234, 12.34, 123.4, float("inf"))] == [
        "12.3 ms", "1.23 s", "12.3 s", "123 s", "never",
    ]  # fmt: skip
    assert [percent(s) for s in (0.0, 0.00021, 0.02, 0.5)] == ["0", "0.021%", "2.00%", "50.0%"]
