import importlib
import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zerolayer.arena.board import CHAOS_HANG, CHAOS_SLOW, ChaosOrder, EngineBoard
from zerolayer.arena.runtime_dir import RuntimeDir
from zerolayer.arena.tables import LoadHeatmap, LoadRow, StallDetectCfg, StallSettings
from zerolayer.cli import chaos, maps, measuring
from zerolayer.cli.main import app
from zerolayer.core.errors import ConfigError

runner = CliRunner()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = RuntimeDir.create(url="http://h:1", model="m", started_unix=1.0, shm=tmp_path)
    monkeypatch.setattr(maps, "find_instance", lambda wanted: made)
    monkeypatch.setattr(chaos, "find_url", lambda url, wanted: "http://h:1")
    monkeypatch.setattr(chaos, "list_instances", lambda shm: [made])
    row = {"id": "e0", "slot": 0, "state": "ready", "core_pid": 4_194_000, "worker_pids": [7]}
    status = {"instance": made.instance, "engines": [row]}
    monkeypatch.setattr(chaos, "fetch_status", lambda url: status)
    yield made
    made.remove()


def test_a_table_is_dumped_as_json_and_as_text(runtime: RuntimeDir) -> None:
    table = LoadHeatmap.create(runtime.table_path("load_heatmap"))
    table.write(0, LoadRow("e0", 0.5, 3, 41.5, 1.0, (10.0, 20.0, 30.0, 40.0, 50.4)))
    result = runner.invoke(app, ["maps", "dump", "load_heatmap", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["active_requests"] == 3
    assert json.loads(result.stdout)[0]["util_percent_next_5s"] == [10.0, 20.0, 30.0, 40.0, 50.4]
    text = runner.invoke(app, ["maps", "dump", "load_heatmap"]).stdout
    assert "41.5" in text
    assert "util_percent_next_5s = 10 20 30 40 50\n" in text


def test_settings_change_while_it_runs_and_a_wrong_one_changes_nothing(
    runtime: RuntimeDir,
) -> None:
    with closing(StallDetectCfg.create(runtime.table_path("stall_detect_cfg"))) as cfg:
        cfg.write(StallSettings())
        done = runner.invoke(
            app, ["maps", "set", "stall_detect_cfg", "threshold_ms=120", "consecutive_failures=5"]
        )
        assert done.exit_code == 0, done.output
        assert cfg.read() == StallSettings(threshold_ms=120, consecutive_failures=5)
        for wrong in ("threshold_ms=-1", "no_such=1", "threshold_ms=fast", "threshold_ms"):
            refused = runner.invoke(app, ["maps", "set", "stall_detect_cfg", wrong])
            assert refused.exit_code == 2, wrong
            assert "Traceback" not in refused.stderr
        assert cfg.read() == StallSettings(threshold_ms=120, consecutive_failures=5)


def test_a_table_that_is_not_there_is_refused_without_traceback(runtime: RuntimeDir) -> None:
    result = runner.invoke(app, ["maps", "dump", "load_heatmap"])
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_hang_slow_and_clear_are_orders_on_the_board(runtime: RuntimeDir) -> None:
    with closing(EngineBoard.create(runtime.board_path(0))) as board:
        assert runner.invoke(app, ["chaos", "hang", "e0"]).exit_code == 0
        assert board.read_chaos().mode == CHAOS_HANG
        assert runner.invoke(app, ["chaos", "slow", "e0", "--factor", "5"]).exit_code == 0
        assert board.read_chaos() == ChaosOrder(CHAOS_SLOW, 5.0)
        assert runner.invoke(app, ["chaos", "clear", "e0"]).exit_code == 0
        assert board.read_chaos() == ChaosOrder()
        wrong = runner.invoke(app, ["chaos", "slow", "e0", "--factor", "0"])
        assert wrong.exit_code == 2
        assert board.read_chaos() == ChaosOrder()


@pytest.mark.parametrize(
    ("word", "number"),
    [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("cont", signal.SIGCONT)],
)
def test_signals_go_to_the_chosen_part(
    runtime: RuntimeDir, monkeypatch: pytest.MonkeyPatch, word: str, number: signal.Signals
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, what: sent.append((pid, what)))
    result = runner.invoke(app, ["chaos", word, "e0", "--part", "worker"])
    assert result.exit_code == 0, result.output
    assert sent == [(7, number)]
    assert number.name in result.stdout


def test_dispatch_figures_are_one_json_line() -> None:
    words = ["bench", "dispatch", "--engines", "2,8", "--decisions", "50", "--json"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert [row["engines"] for row in json.loads(line)["dispatch"]] == [2, 8]


@pytest.mark.parametrize("engines", ["0", "257", "two", "8;64"])
def test_a_wrong_fleet_size_is_refused(engines: str) -> None:
    result = runner.invoke(app, ["bench", "dispatch", "--engines", engines, "--decisions", "1"])
    assert result.exit_code == 2
    assert "--engines" in result.stderr


@given(st.lists(st.integers(-9, 999), min_size=1, max_size=5))
def test_numbers_with_commas_are_read_back(values: list[int]) -> None:
    assert measuring.numbers("--x", ",".join(map(str, values))) == tuple(values)


@given(st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False))
def test_a_change_is_read_back(value: float) -> None:
    assert maps.parse_change(f"threshold_ms={value}") == ("threshold_ms", value)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands where a measurement would start engines."""
    result: dict[str, Any] = {"broken": 0, "tokens_lost": 0, "tokens_repeated": 0, "exact": True}
    for kind in ("demo", "failover", "overhead", "snapshot"):
        module: Any = ModuleType(f"zerolayer.bench.{kind}")
        setattr(module, f"{kind.title()}Options", SimpleNamespace)
        run = lambda options, console: {**result, "asked": vars(options)}  # noqa: E731
        setattr(module, f"run_{kind}", run)
        monkeypatch.setitem(sys.modules, f"zerolayer.bench.{kind}", module)
    return result


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["demo", "own/model", "--engines", "3"], {"model": "own/model", "engines": 3}),
        (["bench", "snapshot", "m"], {"model": "m"}),
        (["bench", "overhead", "m"], {"model": "m"}),
        (
            ["bench", "failover", "m", "--kills", "4", "--contexts", "100,1000"],
            {"model": "m", "kills": 4, "contexts": [100, 1000]},
        ),
    ],
)
def test_a_measurement_gets_only_what_was_named_and_ends_with_one_json_line(
    measured: dict[str, Any], words: list[str], asked: dict[str, Any]
) -> None:
    result = runner.invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {**measured, "asked": asked}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("demo", "--engines 2 --tokens 99 --seed 1 --no-plain-vllm"),
        ("snapshot", "--tokens 90 --seed 1"),
        ("overhead", "--engines 2 --rounds 1 --seconds 1 --streams 2 --seed 1"),
        ("failover", "--kills 1 --freezes 0 --contexts 10,20 --streams 1 --tokens 20 --seed 1"),
    ],
)
def test_every_option_is_one_of_the_measurement(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    module = importlib.import_module(f"zerolayer.bench.{kind}")
    asked: list[Any] = []

    def run(options: Any, console: object) -> dict[str, Any]:
        asked.append(options)
        return {}

    monkeypatch.setattr(module, f"run_{kind}", run)
    group = [] if kind == "demo" else ["bench"]
    result = runner.invoke(app, [*group, kind, "m", *words.split(), "--json"])
    assert result.exit_code == 0, result.output
    asked[0].check()


@pytest.mark.parametrize(
    "broken", [{"broken": 1}, {"tokens_lost": 2}, {"tokens_repeated": 1}, {"exact": False}]
)
def test_a_broken_promise_is_the_exit_status(
    measured: dict[str, Any], broken: dict[str, Any]
) -> None:
    measured.update(broken)
    result = runner.invoke(app, ["demo", "m"])
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["broken"] == measured["broken"]


def test_version_is_printed() -> None:
    assert runner.invoke(app, ["version"]).stdout.startswith("zerolayer ")


def test_a_change_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="threshold_ms=120"):
        maps.parse_change("=3")
