import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from zerolayer.cli.main import app
from zerolayer.cli.run_progress import TimeProgress

runner = CliRunner()


def test_a_short_search_writes_its_evidence_for_programs_and_for_people(tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    result = runner.invoke(
        app,
        ["tune", "--traces", "azure_2023_conv", "--requests", "40", "--engines", "2", "--seeds",
         "1", "--utilisation", "0.7", "--faults", "none", "--jobs", "1", "--minutes", "0.01",
         "--out", str(out)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["score"] <= found["default"]["score"]
    assert found["tried"][0]["stage"] == "default"
    assert set(found["fresh_seeds"]) == {"first", "default", "winner"}
    text = out.with_suffix(".md").read_text()
    assert "| azure_2023_conv |" in text
    assert json.loads(result.output.splitlines()[-1])["tune"]["out"] == str(out)


def test_off_a_terminal_a_line_says_from_time_to_time_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zerolayer.cli.run_progress.SAY_EVERY_S", 0.0)
    written = StringIO()
    with TimeProgress(Console(file=written), 60.0) as progress:
        progress.now_at("peers")
        progress.tried(-0.05)
        progress.look(1.0)
    assert "peers after 0 s" in written.getvalue()
    assert "1 candidates, best -0.050 after 0 s" in written.getvalue()


@pytest.mark.parametrize(
    "words", [("--minutes", "0"), ("--traces", "nowhere"), ("--out", "nowhere/x.json")]
)
def test_what_cannot_be_searched_is_refused(words: tuple[str, str]) -> None:
    result = runner.invoke(app, ["tune", "--minutes", "0.01", "--requests", "10", *words])
    assert result.exit_code == 2, result.output
    assert words[0].removesuffix("s") in result.output
