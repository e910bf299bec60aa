"""One fleet of two real engines for the whole test session, whole again before each test."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zerolayer.bench import chaos_signals
from zerolayer.bench.fleet_process import VLLM_ARGS, FleetOptions, FleetProcess
from zerolayer.engines.model import default_model

#: Tool calls need a parser; everything else is what the benchmarks start.
FLEET_ARGS = (*VLLM_ARGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
#: An engine that stalls again is kept out twice as long as before: 1 s, 2 s, 4 s. After more stalls
#: than these it is quicker to start it anew.
STALLS_MAX = 3


@pytest.fixture(scope="session")
def model() -> str:
    """The packaged model, converted once for this user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(default_model(cache, lambda _what, _done: None))


@pytest.fixture(scope="session")
def shared_fleet(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """The fleet itself; tests use `fleet`, which has two engines ready at the test's start."""
    logs = tmp_path_factory.mktemp("fleet")
    with FleetProcess(FleetOptions(model, vllm_args=FLEET_ARGS, log_dir=logs)) as fleet:
        yield fleet
    assert fleet.ended is not None
    assert fleet.ended.clean, fleet.ended


@pytest.fixture
def fleet(shared_fleet: FleetProcess) -> Iterator[FleetProcess]:
    """Both engines ready, none of them frozen or under an injected fault, before and after."""
    shared_fleet.wait_all_ready()
    yield shared_fleet
    heal(shared_fleet)


def heal(fleet: FleetProcess) -> None:
    """Take back what a test did to the engines; killed ones come back by themselves."""
    status = fleet.status()
    for row in status["engines"]:
        if not chaos_signals.engine_pids(row):
            continue
        fleet.order(row["id"], "none")
        stalls = stalls_of(status, row["id"])
        many = row["state"] == "stalled" and stalls > STALLS_MAX
        chaos_signals.send(row, signal.SIGKILL if many else signal.SIGCONT)


def stalls_of(status: dict[str, Any], engine: str) -> int:
    """How often an engine stalled since it was last started."""
    count = 0
    for event in status["events"]:
        if event["engine"] == engine:
            count = 0 if event["what"].startswith("ready after") else count
            count += event["what"].startswith("stalled:")
    return count
