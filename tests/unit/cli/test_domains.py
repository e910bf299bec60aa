import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from zerolayer.cli import domains as command
from zerolayer.cli.main import app
from zerolayer.dispatch.choices import Domain, parse_domains

runner = CliRunner()


def status(*steps_ms: float | None, labels: Sequence[str] = ()) -> dict[str, Any]:
    named = [*labels, *[""] * (len(steps_ms) - len(labels))]
    return {
        "engines": [
            {"id": f"e{slot}", "domain": 0, "reference_step_ms": step, "labels": own.split()}
            for slot, (step, own) in enumerate(zip(steps_ms, named, strict=True))
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
    assert parse_domains(found["option"]) == (Domain((0, 2)), Domain((1,)))
    assert [engine["slower_than_best"] for engine in found["engines"]] == [0.0, 0.3, 0.02]
    text = shown(monkeypatch, status(10.0, 13.0, 10.2)).stdout
    assert 'proposal: --domains "0,2;1"' in text
    assert "30.0 %" in text


def test_equal_engines_are_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, status(10.0, 10.4))
    assert "proposal: one domain" in result.stdout


def test_labels_are_shown_and_a_proposal_keeps_them_apart_and_on_their_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = status(10.0, 10.0, 13.0, 10.0, labels=("fp8 cheap", "", "fp8 cheap", "fp8 cheap"))
    result = shown(monkeypatch, now)
    assert "labels" in result.stdout
    assert "fp8+cheap" in result.stdout
    assert 'proposal: --domains "fp8+cheap=0,3;1;fp8+cheap=2"' in result.stdout
    found = json.loads(shown(monkeypatch, now, "--json").stdout)
    assert found["engines"][0]["labels"] == ["fp8", "cheap"]
    alike = json.loads(shown(monkeypatch, status(10.0, labels=("fp8",)), "--json").stdout)
    assert alike["option"] == "fp8=0"


def test_an_engine_that_was_not_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, status(10.0, None))
    assert "not measured yet (too few steps): e1" in result.stdout
    assert json.loads(shown(monkeypatch, status(None), "--json").stdout)["option"] == ""


def test_a_server_without_these_figures_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown(monkeypatch, {"engines": [{"id": "e0"}]})
    assert result.exit_code == 2
    assert "another version" in result.stderr
