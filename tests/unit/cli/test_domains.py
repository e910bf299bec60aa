import json
from typing import Any

import pytest
from typer.testing import CliRunner

from zerolayer.cli import domains as command
from zerolayer.cli.main import app
from zerolayer.dispatch.choices import parse_domains

runner = CliRunner()


def status(*steps_ms: float | None) -> dict[str, Any]:
    return {
        "engines": [
            {"id": f"e{slot}", "domain": 0, "reference_step_ms": step}
            for slot, step in enumerate(steps_ms)
        ],
        "placement": {"device": "NVIDIA H200"},
    }


def shown(monkeypatch: pytest.MonkeyPatch, now: dict[str, Any], *words: str) -> Any:
    monkeypatch.setattr(command, "find_url", lambda url, wanted: "http://h:1")
    monkeypatch.setattr(command, "fetch_status", lambda url: now)
    return runner.invoke(app, ["domains", *words])


def test_a_slow_engine_is_proposed_apart_in_words_that_serve_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = shown(monkeypatch, status(10.0, 13.0, 10.2), "--json")
    found = json.loads(result.stdout)
    assert found["option"] == "0,2;1"
    assert parse_domains(found["option"]) == ((0, 2), (1,))
    assert [engine["slower_than_best"] for engine in found["engines"]] == [0.0, 0.3, 0.02]
    text = shown(monkeypatch, status(10.0, 13.0, 10.2)).stdout
    assert 'proposal: --domains "0,2;1"' in text
    assert "30.0 %" in text


def test_equal_engines_are_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, status(10.0, 10.4))
    assert "proposal: one domain" in result.stdout


def test_an_engine_that_was_not_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, status(10.0, None))
    assert "not measured yet (too few steps): e1" in result.stdout
    assert json.loads(shown(monkeypatch, status(None), "--json").stdout)["option"] == ""


def test_a_server_without_these_figures_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, {"engines": [{"id": "e0"}]})
    assert result.exit_code == 2
    assert "another version" in result.stderr
