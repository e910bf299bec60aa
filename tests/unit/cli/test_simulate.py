import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerolayer.cli.main import app
from zerolayer.cli.simulate import shares
from zerolayer.core.errors import ConfigError

runner = CliRunner()


def refused(*words: str) -> str:
    result = runner.invoke(app, ["simulate", *words])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


def small(html: Path, *words: str) -> list[str]:
    return [
        "simulate", "--requests", "80", "--engines", "3", "--seeds", "2", "--jobs", "1",
        "--policies", "round_robin,zerolayer", "--html", str(html), *words,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "nowhere"), "azure_2023_conv"),
        (("--policies", "best"), "zerolayer"),
        (("--policies", "random,random"), "different names"),
        (("--faults", "some"), "stress"),
        (("--gpu", "h900"), "h100-sxm-80gb"),
        (("--model", "tiny"), "llama-3.1-8b"),
        (("--continuation", "magic"), "reprefill"),
        (("--utilisation", "seventy"), "0.7"),
        (("--utilisation", "70"), "--utilisation"),
        (("--engines", "0"), "256"),
        (("--seeds", "0"), "--seeds"),
        (("--requests", "-1"), "--requests"),
        (("--jobs", "0"), "--jobs"),
        (("--html", "no-such-folder/report.html"), "--html"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_to_write_instead(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused("--requests", "50", *words)
    assert not list(tmp_path.iterdir())


def test_a_small_simulation_ends_with_a_table_a_page_and_one_line_of_json(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = runner.invoke(app, small(page))
    assert result.exit_code == 0, result.output
    assert "round_robin" in result.output.splitlines()[4:][0] + result.output
    found = json.loads(result.output.splitlines()[-1])["simulate"]
    (cell,) = found["cells"]
    assert [row["policy"] for row in cell["policies"]] == ["round_robin", "zerolayer"]
    assert cell["policies"][0]["requests"] == 160
    assert cell["policies"][0]["ttft_s"]["p50"]["value"] > 0
    assert found["html"] == str(page)
    assert page.read_text().startswith("<!doctype html>")


def test_the_same_words_give_the_same_figures_with_one_process_and_with_two(
    tmp_path: Path,
) -> None:
    def cells(*words: str) -> object:
        result = runner.invoke(app, small(tmp_path / "report.html", "--json", *words))
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["simulate"]["cells"]

    assert cells() == cells("--jobs", "2")


def test_shares_are_numbers_with_commas_between_them() -> None:
    assert shares("--utilisation", "0.7,0.85") == (0.7, 0.85)
    with pytest.raises(ConfigError):
        shares("--utilisation", "")
