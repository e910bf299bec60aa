import socket
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zerolayer.cli import before_start, environment
from zerolayer.cli import serve as serve_command
from zerolayer.cli.main import app
from zerolayer.cli.packaged import PACKAGED_NAME
from zerolayer.cli.parsing import split_at_dashes
from zerolayer.core.errors import ConfigError, EngineError
from zerolayer.dispatch.choices import Admission, Domain

runner = CliRunner()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Stands where the real server would start, and notes what it was asked for."""
    asked: list[Any] = []
    module: Any = ModuleType("zerolayer.app.serve")
    module.ServeOptions = SimpleNamespace

    def run_serve(options: Any, on_event: Any) -> int:
        on_event(SimpleNamespace(engine="e0", what="ready after 5.0 s", unix=0.0))
        on_event(SimpleNamespace(engine="e0", what="suspect: late", unix=0.0))
        on_event(SimpleNamespace(engine="fleet", what="serving at http://127.0.0.1:1", unix=0.0))
        asked.append(options)
        return 0

    module.run_serve = run_serve
    monkeypatch.setitem(sys.modules, "zerolayer.app.serve", module)
    monkeypatch.setattr(serve_command, "SHM", tmp_path)
    monkeypatch.setattr(environment, "set_vllm_defaults", lambda **_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return asked


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_words_behind_the_dashes_reach_vllm_unchanged(served: list[Any], model: str) -> None:
    words = ["--max-model-len", "64", "--host-looking", "--", "-x", "--uvicorn-log-level=debug"]
    result = runner.invoke(app, ["serve", model, "--port", str(free_port()), "--", *words])
    assert result.exit_code == 0, result.output
    assert served[0].model == model
    assert served[0].vllm_args == ("--disable-uvicorn-access-log", *words)


def test_what_is_chosen_about_placement_reaches_the_server(served: list[Any], model: str) -> None:
    result = runner.invoke(
        app,
        ["serve", model, "--port", str(free_port()), "--policy", "least_requests", "--admission",
         "reject", "--domains", "cheap=0;1,2", "--drain-gpu-percent", "80", "--drain-samples", "5"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    placement = served[0].placement
    assert (placement.policy, placement.admission) == ("least_requests", Admission.REJECT)
    assert placement.domains == (Domain((0,), ("cheap",)), Domain((1, 2)))
    assert (placement.drain.util_over, placement.drain.mem_over) == (0.8, 0.95)
    assert placement.drain.samples == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "fastest"], "least_requests"),
        (["--domains", "0;7"], "slots 0 to 1"),
        (["--domains", "FP8=0;1"], "FP8"),
        (["--drain-gpu-percent", "200"], "--drain-gpu-percent"),
    ],
)
def test_a_choice_about_placement_that_makes_no_sense_starts_nothing(
    served: list[Any], model: str, words: list[str], said: str
) -> None:
    result = runner.invoke(app, ["serve", model, "--port", str(free_port()), *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not served


def test_options_reach_the_server(served: list[Any], model: str, tmp_path: Path) -> None:
    logs, port = tmp_path / "my-logs", free_port()
    result = runner.invoke(
        app,
        ["serve", model, "--engines", "3", "--engines-per-gpu", "2", "--port", str(port),
         "--no-snapshots",
         "--snapshot-gib", "0.5", "--wait-for-engine", "7", "--log-dir", str(logs), "--verbose"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    asked = served[0]
    assert (asked.engines, asked.port, asked.snapshots) == (3, port, False)
    assert asked.engines_per_gpu == 2
    assert (asked.snapshot_bytes, asked.wait_for_engine_s) == (2**29, 7.0)
    assert (asked.log_dir, asked.vllm_args) == (logs, ())
    assert logs.is_dir()


def test_progress_names_each_engine_and_ends_with_the_address(
    served: list[Any], model: str
) -> None:
    result = runner.invoke(app, ["serve", model, "--port", str(free_port())])
    assert "ready after 5.0 s" in result.stderr
    assert "ready at http://127.0.0.1:1/v1" in result.stderr
    assert "suspect" not in result.stderr
    assert result.stdout == ""


def test_the_packaged_model_is_converted_and_served_under_its_own_name(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged: Any = ModuleType("zerolayer.engines.model")
    packaged.default_model = lambda cache, progress: cache / "m"
    monkeypatch.setitem(sys.modules, "zerolayer.engines.model", packaged)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    result = runner.invoke(app, ["serve", "--port", str(free_port()), "--", "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert served[0].model == "/cache/m"
    assert served[0].vllm_args[:2] == ("--served-model-name", PACKAGED_NAME)
    assert served[0].vllm_args[-2:] == ("--seed", "1")


def refused(result: Any) -> str:
    """The one line of a refusal."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    line: str = result.stderr.strip()
    assert line.startswith("zerolayer: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--engines", "0"], "--engines"),
        (["--engines", "257"], "256"),
        (["--engines-per-gpu", "0"], "--engines-per-gpu"),
        (["--port", "70000"], "--port"),
        (["--snapshot-gib", "0"], "--snapshot-gib"),
        (["--wait-for-engine", "-1"], "--wait-for-engine"),
        (["/no/such/model"], "no such folder"),
        (["a/b/c/d"], "owner/name"),
        (["--host", "203.0.113.1"], "--host"),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(
    served: list[Any], words: list[str], named: str
) -> None:
    assert named in refused(runner.invoke(app, ["serve", *words]))
    assert served == []


def test_a_taken_port_is_named(served: list[Any], model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(runner.invoke(app, ["serve", model, "--port", port]))
    assert port in line
    assert "another program" in line


def test_a_missing_tmpfs_is_named(
    served: list[Any], model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve_command, "SHM", tmp_path / "none")
    line = refused(runner.invoke(app, ["serve", model, "--port", str(free_port())]))
    assert "mount -t tmpfs" in line


def test_a_failed_start_is_one_line(
    served: list[Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(options: Any, on_event: Any) -> int:
        raise EngineError("no engine could be started: out of memory")

    monkeypatch.setattr(sys.modules["zerolayer.app.serve"], "run_serve", fails)
    result = runner.invoke(app, ["serve", model, "--port", str(free_port())])
    assert result.exit_code == 2
    assert "zerolayer: no engine could be started: out of memory" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        before_start.check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["owner/name", "name", "org.x/Name-1.0_b"])
def test_a_hub_name_is_left_to_vllm(name: str) -> None:
    assert before_start.check_model(name) == name


def test_too_little_shared_memory_is_a_note_that_says_what_happens(tmp_path: Path) -> None:
    note = before_start.snapshot_room_note(tmp_path, 256, 1 << 50)
    assert note is not None
    assert "without them" in note
    assert before_start.snapshot_room_note(tmp_path, 1, 1) is None


def test_what_the_user_set_is_kept_and_only_cpus_get_cpu_settings() -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "9"}
    environment.set_vllm_defaults(verbose=False, packaged_model=True, nvidia=False, environ=environ)
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert environ["HF_HUB_OFFLINE"] == "1"
    gpu: dict[str, str] = {}
    environment.set_vllm_defaults(verbose=True, packaged_model=False, nvidia=True, environ=gpu)
    assert set(gpu) == {"VLLM_NO_USAGE_STATS", "TOKENIZERS_PARALLELISM"}


def test_an_nvidia_device_node_is_seen(tmp_path: Path) -> None:
    assert not environment.nvidia_present(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert environment.nvidia_present(tmp_path)


def test_old_log_folders_of_ours_are_removed_and_nothing_else(tmp_path: Path) -> None:
    logs = tmp_path / "zerolayer" / "logs"
    for day in range(1, 26):
        (logs / f"202501{day:02d}-120000").mkdir(parents=True)
    (logs / "keep-me").mkdir()
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    new = environment.new_log_dir(datetime(2025, 2, 1, 8, 0, 0), environ)
    assert new == logs / "20250201-080000"
    left = sorted(path.name for path in logs.iterdir())
    assert len(left) == environment.LOG_FOLDERS_KEPT
    assert left[0] == "20250107-120000"
    assert "keep-me" in left


@given(st.lists(st.sampled_from(["a", "--b", "-c", "--"]), max_size=8))
def test_the_first_dashes_split_and_nothing_is_lost(args: list[str]) -> None:
    own, passed = split_at_dashes(args)
    assert "--" not in own
    again = [*own, "--", *passed] if "--" in args else own
    assert again == args
