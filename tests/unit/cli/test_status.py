import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from zerolayer.arena.runtime_dir import RuntimeDir
from zerolayer.cli import instances
from zerolayer.cli import status as status_command
from zerolayer.cli.chaos import Part, pids_of
from zerolayer.cli.main import app
from zerolayer.cli.status_table import status_view
from zerolayer.core.errors import ConfigError, EngineError

runner = CliRunner()


def engine(slot: int, **other: Any) -> dict[str, Any]:
    return {
        "id": f"e{slot}", "slot": slot, "state": "ready", "incarnation": 1, "core_pid": 100 + slot,
        "worker_pids": [200 + slot], "streams": 1, "running": 1, "waiting": 0,
        "kv_used_percent": 12.5, "expected_step_ms": 55.25, "restarts": 0, "last_fault": "",
        "up_since": 1.0, "missing_capacity_s": 3.0, "snapshots": "on", **other,
    }  # fmt: skip


def status(**other: Any) -> dict[str, Any]:
    move = {
        "stream": "0_chatcmpl-1-0a1b2c3d", "external_id": "chatcmpl-1", "from": "e1", "to": "e0",
        "reason": "its core was killed [by signal 9]", "delivered_tokens": 7, "context_tokens": 40,
        "restored_tokens": 39, "declared_unix": 1_700_000_000.0, "after_declared_ms": 61.5,
    }  # fmt: skip
    return {
        "instance": "0123456789abcdef", "url": "http://127.0.0.1:8000", "model": "tiny",
        "started": 1_700_000_000.0, "snapshots": True,
        "engines": [
            engine(0),
            engine(1, state="dead", core_pid=None, worker_pids=[], expected_step_ms=None,
                   last_fault="its core was killed [by signal 9]"),
        ],
        "streams": {"active": 2, "waiting_for_engine": 1},
        "totals": {"streams": 5, "tokens_delivered": 321, "outputs_fenced": 2, "moves": 1,
                   "resumed_from_snapshot": 1, "resumed_by_prefill": 0,
                   "outcomes": {"finished": 3}},
        "dispatch": {"count": 5, "p50_us": 12.0, "p99_us": None},
        "recent_moves": [move],
        "events": [{"unix": 1_700_000_000.0, "engine": "e1", "what": "ended: [killed]"}],
        **other,
    }  # fmt: skip


def warm(**other: Any) -> dict[str, Any]:
    return {
        "forecast_util": [0.1, 0.4, 0.8, 1.0, 1.3], "forecast_mem": [0.5] * 5, "hot": False,
        "entropy_share": 0.0125, "tokens_per_s": 41.4, "free_run_tokens": 640, "link_use": 0.02,
        "fragmentation": 0.25, "domain": 0, "step_error": {"steps": 9, "p50": 0.1, "p90": 0.25},
        **other,
    }  # fmt: skip


PLACEMENT = {
    "policy": "zerolayer", "admission": "queue", "objective": 0.025, "utilisation_std": 0.1,
    "ttft_error": {"count": 3, "p50": 0.2, "p90": 0.5},
}  # fmt: skip


Answer = Callable[[dict[str, Any]], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    now = status()
    monkeypatch.setattr(status_command, "fetch_status", lambda url: now)
    return now


def shown(now: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_view(now, now_unix=1_700_090_061.0))
    console.file.close()
    return console.export_text()


def test_the_next_seconds_of_each_engine_are_a_strip_and_errors_are_told() -> None:
    now = status(
        engines=[engine(0, **warm()), engine(1, **warm(hot=True, free_run_tokens=None))],
        placement=PLACEMENT,
    )
    text = shown(now, width=80)
    for word in ("▁▄▇██ 130", "▅▅▅▅▅  50", "0.013", "640", "hot"):
        assert word in text, word
    assert "placed by zerolayer, admission queue; unevenness 0.0250" in text
    assert "predicted TTFT off by: p50 20 %, p90 50 %\n" in text
    assert "predicted step off by: p50 10 %, p90 25 % (worst engine)\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_status_without_a_forecast_has_no_strips() -> None:
    assert "next 5 s" not in shown(status())


def test_the_table_shows_every_engine_and_the_totals() -> None:
    text = shown(status())
    assert "up 1 d 1:01:01" in text
    for word in ("e0", "ready", "55.2", "dead", "12.5", "321", "chatcmpl-1", "61.5", "p99 - us"):
        assert word in text, word
    assert "[by signal 9]" in text  # a fault is text and never markup


def test_an_engine_without_snapshots_says_why() -> None:
    text = shown(status(engines=[engine(0, snapshots="the tmpfs [/dev/shm] is full")]))
    assert "e0 keeps no snapshots: the tmpfs [/dev/shm] is full" in text


def test_gpus_are_named_where_engines_have_any() -> None:
    assert "GPUs" not in shown(status(engines=[engine(0, gpus=[])]))
    text = shown(status(engines=[engine(0, gpus=["0", "1"]), engine(1, gpus=["MIG-4fa7[c1]"])]))
    assert "GPUs: e0 0,1; e1 MIG-4fa7[c1]" in text


def test_the_engines_fit_into_80_columns() -> None:
    big = engine(255, state="set_aside", core_pid=4_194_303, streams=1024, expected_step_ms=1234.5)
    text = shown(status(engines=[big], recent_moves=[]), width=80)
    assert "…" not in text
    assert "restarts" in text
    assert "4194303" in text


def test_a_fleet_without_moves_and_events_is_shown_too() -> None:
    assert "e0" in shown(status(recent_moves=[], events=[]))


def test_json_is_what_the_server_said(answers: dict[str, Any]) -> None:
    result = runner.invoke(app, ["status", "--json", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == answers


def test_watch_ends_cleanly_with_ctrl_c(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    result = runner.invoke(app, ["status", "--watch", "--json", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 3
    assert seen == [1.0, 1.0, 1.0]


def test_a_closed_port_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(app, ["status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "is not open" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_instance_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(instances.NotFound, match="zerolayer serve"):
        instances.find_instance(None, tmp_path)


def test_one_instance_is_found_and_several_are_listed(tmp_path: Path) -> None:
    made = [
        RuntimeDir.create(url=f"http://h:{port}", model="m", started_unix=port, shm=tmp_path)
        for port in (1, 2)
    ]
    try:
        with pytest.raises(instances.NotFound) as several:
            instances.find_instance(None, tmp_path)
        for each in made:
            assert each.instance in str(several.value)
            assert instances.find_url(None, each.instance[:8], tmp_path) == each.info.url
        made.pop().remove()
        assert instances.find_url(None, None, tmp_path) == "http://h:1"
        with pytest.raises(instances.NotFound, match="no instance is called xyz"):
            instances.find_instance("xyz", tmp_path)
    finally:
        for each in made:
            each.remove()


@pytest.mark.parametrize(
    ("part", "pids"), [(Part.CORE, [100]), (Part.WORKER, [200]), (Part.TREE, [100, 200])]
)
def test_a_part_of_an_engine_is_its_pids(part: Part, pids: list[int]) -> None:
    assert pids_of(status(), "e0", part) == pids
    assert pids_of(status(), "0", part) == pids


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match="e1 is dead"):
        pids_of(status(), "e1", Part.TREE)
    with pytest.raises(ConfigError, match="this fleet has e0, e1"):
        pids_of(status(), "e7", Part.TREE)
    with pytest.raises(ConfigError, match="not an engine"):
        pids_of(status(), "gpu", Part.TREE)


def test_help_and_status_load_nothing_heavy() -> None:
    code = (
        "import sys; import zerolayer.cli.main; import zerolayer.cli.status_table;"
        "print(sorted({'vllm', 'torch', 'numpy', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
