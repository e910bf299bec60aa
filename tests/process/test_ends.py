"""However a fleet ends, nothing of it stays: no process, no file; and what is wrong is said."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.asking import ANSWER_TIMEOUT_S, COMPLETIONS, Ask
from tests.waiting import until
from zerolayer.arena.runtime_dir import list_instances
from zerolayer.bench.fleet_process import ENVIRONMENT, FleetOptions, FleetProcess
from zerolayer.bench.server_process import free_port

ENDS_WITHIN_S = 10.0
#: A socket of vLLM's, its process group's file, and what holds a fork server's socket.
TEMPORARY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$|vllm_dist_|pymp-")
ENDLESS = Ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "seed": 1})


@contextmanager
def streaming(fleet: FleetProcess) -> Iterator[Iterator[str]]:
    """A stream that has begun, line by line to its end or cut."""
    with (
        httpx.Client(base_url=fleet.base_url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as http,
        http.stream("POST", ENDLESS.path, json=ENDLESS.sent()) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        next(lines)
        yield lines


def temporary_files() -> set[Path]:
    """What vLLM and multiprocessing make in the system's directory for temporary files."""
    entries = Path(tempfile.gettempdir()).iterdir()
    return {path for path in entries if TEMPORARY.match(path.name)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "hang-up"])
def test_a_terminal_ends_everything_while_streams_run_and_an_engine_is_frozen(
    model: str, number: signal.Signals
) -> None:
    before = temporary_files()
    with FleetProcess(FleetOptions(model)) as fleet, streaming(fleet):
        fleet.stop("e1")
        report = fleet.end(number)
    assert report.seconds < ENDS_WITHIN_S, report
    assert report.clean, report
    assert report.exit_code == 0, fleet.log_tail()
    assert temporary_files() <= before


def test_engines_end_with_a_serving_process_that_is_killed_and_the_next_start_cleans_up(
    model: str,
) -> None:
    before = temporary_files()
    with FleetProcess(FleetOptions(model)) as fleet, streaming(fleet):
        fleet.stop("e1")
        runtime = fleet.runtime().path
        report = fleet.end(signal.SIGKILL)
    assert not report.leftover_processes, "engines outlive their serving process"
    assert report.leftover_files, "nothing was left to clean up: the test proves nothing"
    assert all(Path(file).is_relative_to(runtime) for file in report.leftover_files)

    later = FleetProcess(FleetOptions(model))
    with started_only(later):
        until(lambda: not runtime.exists(), seconds=60.0)
        until(lambda: list_instances() and later.tree()[1:], seconds=60.0)
        report = later.end(signal.SIGTERM)
    assert report.seconds < ENDS_WITHIN_S, report
    assert report.clean, report
    assert not [i for i in list_instances() if i.info.pid == later.pid]
    assert temporary_files() <= before


@contextmanager
def started_only(fleet: FleetProcess) -> Iterator[None]:
    """The process of a fleet that nobody waits for."""
    fleet._start()
    try:
        yield
    finally:
        fleet.end(signal.SIGKILL)


class InSmallSharedMemory(FleetProcess):
    """A fleet that sees a /dev/shm of its own, of a few MiB."""

    MIB = 448

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options)
        mount = f"mount -t tmpfs -o size={self.MIB}m tmpfs /dev/shm"
        argv = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *self.command.argv)
        self.command = replace(self.command, argv=argv)

    def _find_runtime(self) -> None:
        """It is in the other /dev/shm."""


def may_mount() -> bool:
    mounted = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        check=False,
    )
    return mounted.returncode == 0


def test_an_engine_without_room_serves_without_snapshots_and_one_error_ends_a_lost_stream(
    model: str,
) -> None:
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    words = ("--snapshot-gib", "1", "--wait-for-engine", "1")
    fleet = InSmallSharedMemory(FleetOptions(model, engines=1, serve_args=words))
    with fleet:
        said = fleet.status()["engines"][0]["snapshots"]
        assert "/dev/shm" in said, said
        assert "free" in said, said
        with streaming(fleet) as lines:
            fleet.kill("e0")
            rest = list(lines)
        errors = [line for line in rest if '"error"' in line]
        assert len(errors) == 1, rest[-3:]
        assert "no engine came back within 1 s" in errors[0]
        assert rest[-1] == errors[0]
        assert fleet.status()["totals"]["outcomes"] == {"engines_lost": 1}
        fleet.wait_all_ready()
        report = fleet.end()
    assert report.seconds < ENDS_WITHIN_S, report
    assert report.clean, report


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    """`zerolayer serve` with words that cannot work."""
    return subprocess.run(
        [sys.executable, "-m", "zerolayer.cli", "serve", *words],
        env={**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def assert_one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    last = ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else ""
    assert ended.returncode == 2, (ended.returncode, ended.stderr)
    assert "Traceback" not in ended.stderr + ended.stdout
    for word in words:
        assert word in last, ended.stderr


def test_a_port_that_is_taken_is_refused_in_one_line(shared_fleet: FleetProcess) -> None:
    port = str(shared_fleet.command.port)
    assert_one_line(serve("--port", port), "--port", port)


def test_a_model_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    assert_one_line(serve(str(tmp_path / "no-model")), "MODEL", "no-model")


def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_one_line(serve(str(tmp_path), "--port", str(free_port())), "MODEL")


def test_an_unknown_word_for_vllm_is_refused_in_one_line(model: str) -> None:
    ended = serve(model, "--port", str(free_port()), "--", "--no-such-word", "7")
    assert_one_line(ended, "--no-such-word")


def test_a_wrong_value_for_vllm_is_refused_in_one_line(model: str) -> None:
    ended = serve(model, "--port", str(free_port()), "--", "--max-model-len", "9999999")
    assert_one_line(ended, "max")
