import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerolayer.arena.board import CoreState
from zerolayer.core.engine_state import EngineEvent, EngineLife
from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.engines.status import status_of
from zerolayer.stitch.driver import Totals
from zerolayer.stitch.moves import MoveRecord

FIELDS = {
    "instance", "url", "model", "started", "snapshots", "engines", "streams", "totals", "dispatch",
    "recent_moves", "events",
}  # fmt: skip
ENGINE_FIELDS = {
    "id", "slot", "state", "incarnation", "core_pid", "worker_pids", "streams", "running",
    "waiting", "kv_used_percent", "expected_step_ms", "restarts", "last_fault", "up_since",
    "missing_capacity_s", "snapshots",
}  # fmt: skip


def move(stream: str) -> MoveRecord:
    return MoveRecord(stream, "e1", "e0", "killed", 7, 40, 39, 1.0, 61.4567, 70.0, False)


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """Engine 0 up, engine 1 dead."""
    load = FleetState(2)
    load.report(0, EngineReport(0.125, 0, 0.05, 0.001, 0.001))
    lives = [EngineLife(), EngineLife()]
    lives[0].apply(EngineEvent.CAME_UP)
    lives[1].apply(EngineEvent.DIED)
    record = {"restarts": 2, "last_fault": "", "start_seconds": 5.0, "missing_capacity_s": 1.0}
    live = SimpleNamespace(launched=SimpleNamespace(pids=(10, 11, 12)))
    supervisors = [
        SimpleNamespace(
            slot=slot, live=live if slot == 0 else None, state=lives[slot].state,
            record=SimpleNamespace(up_since=1.0 - slot, down_since_ns=slot, **record),
        )
        for slot in range(2)
    ]  # fmt: skip
    driver = SimpleNamespace(
        fleet=load, lives=lives, totals=Totals(streams=3, outcomes={"finished": 2}),
        owned={"a": None}, waiting={}, on_engine=[{"a": None}, {}],
        dispatch_ns=[1_000 * us for us in range(100, 0, -1)],
        recent_moves=[move("3_chatcmpl-x-y-0a1b2c3d"), move("odd")],
    )  # fmt: skip
    board = CoreState(running_requests=1, waiting_requests=4)
    return SimpleNamespace(
        runtime=SimpleNamespace(
            instance="i", path=tmp_path,
            info=SimpleNamespace(url="u", model="m", started=1.0, pid=9),
        ),
        driver=driver, supervisors=supervisors,
        settings=SimpleNamespace(snapshots=True, log_dir=tmp_path),
        boards=[SimpleNamespace(read_core=lambda: board)] * 2,
        watch=SimpleNamespace(expected_step_s=lambda slot: 0.05525),
        events=[SimpleNamespace(unix=1.0, engine="e1", what="ended")],
    )  # fmt: skip


def test_the_status_is_json_with_every_promised_field(fleet: Any) -> None:
    status = json.loads(json.dumps(status_of(fleet), allow_nan=False))
    assert status.keys() >= FIELDS
    for engine in status["engines"]:
        assert engine.keys() >= ENGINE_FIELDS


def test_a_live_engine_shows_its_processes_and_load(fleet: Any) -> None:
    up = status_of(fleet)["engines"][0]
    assert (up["state"], up["core_pid"], up["worker_pids"]) == ("ready", 10, [11, 12])
    assert (up["running"], up["waiting"], up["streams"]) == (1, 4, 1)
    assert (up["kv_used_percent"], up["expected_step_ms"]) == (12.5, 55.25)


def test_a_dead_engine_shows_no_process_and_no_stale_load(fleet: Any) -> None:
    dead = status_of(fleet)["engines"][1]
    assert (dead["state"], dead["core_pid"], dead["worker_pids"]) == ("dead", None, [])
    assert (dead["running"], dead["expected_step_ms"], dead["up_since"]) == (0, None, None)
    assert dead["missing_capacity_s"] > 1.0  # this outage counts while it lasts


def test_snapshots_say_why_they_are_off(fleet: Any) -> None:
    note = fleet.runtime.path / "arena-e1-1.off"
    note.write_text("the tmpfs is full\n")
    assert [e["snapshots"] for e in status_of(fleet)["engines"]] == ["on", "the tmpfs is full"]
    fleet.settings.snapshots = False
    assert [e["snapshots"] for e in status_of(fleet)["engines"]] == ["off", "off"]


def test_dispatch_percentiles_are_nearest_ranks_and_none_before_the_first(fleet: Any) -> None:
    assert status_of(fleet)["dispatch"] == {"count": 3, "p50_us": 51.0, "p99_us": 100.0}
    fleet.driver.dispatch_ns = []
    assert status_of(fleet)["dispatch"]["p99_us"] is None


def test_a_move_names_the_request_as_the_client_knows_it(fleet: Any) -> None:
    moves = status_of(fleet)["recent_moves"]
    assert [each["external_id"] for each in moves] == ["chatcmpl-x-y", "odd"]
    assert (moves[0]["from"], moves[0]["to"], moves[0]["after_declared_ms"]) == ("e1", "e0", 61.46)
