import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerolayer.arena.board import CoreState
from zerolayer.core.engine_state import EngineEvent, EngineLife
from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.dispatch.choices import PlacementChoices
from zerolayer.dispatch.cost import ErrorPercentiles
from zerolayer.dispatch.outlook import Outlook
from zerolayer.engines.gpus import Gpus
from zerolayer.engines.prefixes import Prefixes
from zerolayer.engines.status import status_of
from zerolayer.engines.status_placement import load_rows
from zerolayer.stitch.driver import Totals
from zerolayer.stitch.moves import MoveRecord

FIELDS = {
    "instance", "url", "model", "started", "snapshots", "engines", "streams", "totals", "dispatch",
    "recent_moves", "events", "placement",
}  # fmt: skip
ENGINE_FIELDS = {
    "id", "slot", "state", "incarnation", "core_pid", "worker_pids", "streams", "running",
    "waiting", "kv_used_percent", "expected_step_ms", "restarts", "last_fault", "up_since",
    "missing_capacity_s", "snapshots", "domain", "labels", "hot", "utilisation", "forecast_util",
    "forecast_mem", "entropy_share", "tokens_per_s", "free_run_tokens", "fragmentation", "link_use",
    "step_error", "reference_step_ms", "step_model_s", "demand", "hardware", "gpus",
}  # fmt: skip
PLACEMENT_FIELDS = {
    "policy", "admission", "objective", "utilisation_std", "drain_rule", "expected_output_tokens",
    "ttft_error", "prefix_hits", "batch_tokens",
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
        owned={"a": None}, waiting={}, held=set(), on_engine=[{"a": None}, {}],
        dispatch_ns=[1_000 * us for us in range(100, 0, -1)],
        recent_moves=[move("3_chatcmpl-x-y-0a1b2c3d"), move("odd")],
    )  # fmt: skip
    board = CoreState(running_requests=1, waiting_requests=4)
    return SimpleNamespace(
        runtime=SimpleNamespace(
            instance="i", path=tmp_path,
            info=SimpleNamespace(url="u", model="m", started=1.0, pid=9),
        ),
        driver=driver, supervisors=supervisors, arguments=("--max-num-seqs", "4"),
        operations=SimpleNamespace(newest=None),
        settings=SimpleNamespace(snapshots=True, log_dir=tmp_path, gpus=Gpus(("4", "7"), 1)),
        boards=[SimpleNamespace(read_core=lambda: board)] * 2,
        watch=SimpleNamespace(
            expected_step_s=lambda slot: 0.05525,
            reference_step_s=lambda slot: 0.04,
            step_errors=lambda slot: ErrorPercentiles(9, 0.1, 0.2, 0.3),
            step_model=lambda slot: (0.05, 0.0015, 0.0005, 1e-06, 0.0),
        ),
        vllm_config=SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        ),
        placing=SimpleNamespace(choices=PlacementChoices(), outlook=Outlook(2)),
        prefixes=Prefixes(snapshots=True), counters=SimpleNamespace(shown=lambda slot: None),
        events=[SimpleNamespace(unix=1.0, engine="e1", what="ended")],
    )  # fmt: skip


def test_the_status_is_json_with_every_promised_field(fleet: Any) -> None:
    status = json.loads(json.dumps(status_of(fleet), allow_nan=False))
    assert status.keys() >= FIELDS
    assert status["placement"].keys() >= PLACEMENT_FIELDS
    for engine in status["engines"]:
        assert engine.keys() >= ENGINE_FIELDS


def test_a_live_engine_shows_its_processes_and_load(fleet: Any) -> None:
    up = status_of(fleet)["engines"][0]
    assert (up["state"], up["core_pid"], up["worker_pids"]) == ("ready", 10, [11, 12])
    assert (up["running"], up["waiting"], up["streams"]) == (1, 4, 1)
    assert (up["kv_used_percent"], up["expected_step_ms"]) == (12.5, 55.25)
    assert up["reference_step_ms"] == 40.0
    assert up["step_model_s"] == [0.05, 0.0015, 0.0005, 1e-06, 0.0]


def test_a_dead_engine_shows_no_process_and_no_stale_load(fleet: Any) -> None:
    dead = status_of(fleet)["engines"][1]
    assert (dead["state"], dead["core_pid"], dead["worker_pids"]) == ("dead", None, [])
    assert (dead["running"], dead["expected_step_ms"], dead["up_since"]) == (0, None, None)
    assert dead["missing_capacity_s"] > 1.0  # this outage counts while it lasts


def test_an_engine_shows_its_gpus_whether_it_is_up_or_not(fleet: Any) -> None:
    assert [engine["gpus"] for engine in status_of(fleet)["engines"]] == [["4"], ["7"]]


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


def test_the_heat_map_has_a_row_per_slot_in_percent(fleet: Any) -> None:
    load = fleet.driver.fleet
    load.set_standing(0, accepts=True)
    load.forecast_util[0] = [0.1, 0.2, 0.3, 0.4, 1.5]
    rows = load_rows(fleet, 7.0)
    assert [row.engine for row in rows] == ["e0", "e1"]
    assert rows[0].util_percent_next_5s == pytest.approx((10, 20, 30, 40, 150))
    assert (rows[0].memory_percent, rows[0].updated) == (12.5, 7.0)
