import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from zerolayer.cli.main import app
from zerolayer.core.fleet_state import HORIZON_S

runner = CliRunner()


def trace_of(seconds: int, folder: Path) -> str:
    """A CSV of three requests a second."""
    rng = np.random.default_rng(5)
    arrival = np.sort(rng.uniform(0.0, seconds, 3 * seconds))
    rows = [f"{at:.3f},{rng.integers(50, 2000)},{rng.integers(2, 60)}" for at in arrival]
    path = folder / "made_up.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def test_a_small_measurement_ends_with_a_table_a_verdict_and_one_line_of_json(
    tmp_path: Path,
) -> None:
    words = ["bench", "forecast", "--trace", trace_of(200, tmp_path), "--engines", "2"]
    result = runner.invoke(app, [*words, "--seconds", "60"])
    assert result.exit_code == 0, result.output
    assert "utilisation, fleet" in result.output
    assert "Against no change" in result.output
    found = json.loads(result.output.splitlines()[-1])
    rows = {(row["rate"], row["quantity"]): row for row in found["forecast"]}
    assert set(rows) == {
        ("recorded", "requests"), ("recorded", "prompt_tokens"), ("fleet", "requests"),
        ("fleet", "prompt_tokens"), ("fleet", "utilisation"), ("fleet", "memory"),
    }  # fmt: skip
    independent = rows["recorded", "requests"]["no_change_rms"]
    assert len(independent) == HORIZON_S
    assert min(independent) > 0.1  # independent arrivals: 0.29 is what there is to gain
    assert next(iter(found["ttft_error"].values()))["count"] > 0
    again = runner.invoke(app, [*words, "--seconds", "60", "--json"])
    assert json.loads(again.stdout) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "nowhere"), "azure_2023_conv"),
        (("--engines", "0"), "256"),
        (("--utilisation", "70"), "0.7"),
        (("--seconds", "10"), "60"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_write_instead(
    words: tuple[str, ...], said: str
) -> None:
    result = runner.invoke(app, ["bench", "forecast", *words])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_trace_of_a_few_seconds_is_refused(tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "forecast", "--trace", trace_of(20, tmp_path)])
    assert result.exit_code == 2
    assert "60 s or more" in result.output
