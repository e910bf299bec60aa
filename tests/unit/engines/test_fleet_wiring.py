"""A fleet without engines: its parts know each other."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from zerolayer.arena.runtime_dir import RuntimeDir
from zerolayer.arena.tables import dump
from zerolayer.core.engine_state import EngineEvent
from zerolayer.dispatch.choices import PlacementChoices, parse_domains
from zerolayer.dispatch.policies.round_robin import RoundRobin
from zerolayer.engines.fleet import Fleet, FleetSettings
from zerolayer.engines.gpus import Gpus
from zerolayer.engines.housekeeping import Housekeeping
from zerolayer.engines.status import status_of
from zerolayer.engines.watch import FleetWatch


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimeDir]:
    made = RuntimeDir.create(url="http://h:1", model="m", started_unix=1.0, shm=tmp_path)
    yield made
    made.remove()


@contextmanager
def fleet_of(runtime: RuntimeDir, tmp_path: Path, choices: PlacementChoices) -> Iterator[Any]:
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(),
        cache_config=SimpleNamespace(block_size=32),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )
    settings = FleetSettings(
        engines=3, snapshots=True, snapshot_bytes=1, wait_for_engine_s=1.0, log_dir=tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6"}, placement=choices,
        gpus=Gpus(("4", "5", "6"), each=1),
    )  # fmt: skip
    fleet = Fleet(config, runtime, settings)
    for slot in (0, 1):
        fleet.driver.apply(slot, EngineEvent.CAME_UP)
    yield fleet
    fleet.launcher._zmq.term()


async def test_a_tick_fills_the_heat_map_and_the_status_for_everyone_to_see(
    runtime: RuntimeDir, tmp_path: Path
) -> None:
    with fleet_of(runtime, tmp_path, PlacementChoices(domains=parse_domains("fp8=0,1"))) as fleet:
        await ticks(fleet, runtime)


async def ticks(fleet: Any, runtime: RuntimeDir) -> None:
    watch, keeping = FleetWatch(fleet), Housekeeping(fleet)
    fleet.driver.fleet.set_capacity(0, requests_max=4, kv_tokens=1000)
    fleet.driver.fleet.placed(0, 100)
    await watch._tick()
    keeping._write_heatmap()
    rows = dump("load_heatmap", runtime.table_path("load_heatmap"))
    assert [row["engine"] for row in rows] == ["e0", "e1", "e2"]
    assert rows[0]["entropy_score"] > 0.0
    assert time.time() - rows[0]["updated"] < 60.0
    status = json.loads(json.dumps(status_of(fleet), allow_nan=False))
    assert status["placement"]["policy"] == "zerolayer"
    assert [engine["domain"] for engine in status["engines"]] == [0, 0, 1]
    assert [engine["labels"] for engine in status["engines"]] == [["fp8"], ["fp8"], []]
    assert status["engines"][0]["entropy_share"] == pytest.approx(
        rows[0]["entropy_score"], abs=1e-4
    )


async def test_a_slot_keeps_its_gpus_at_every_start(runtime: RuntimeDir, tmp_path: Path) -> None:
    with fleet_of(runtime, tmp_path, PlacementChoices()) as fleet:
        fleet.trials[1] = fleet.configs[1]
        orders = [fleet.order(1, incarnation) for incarnation in (1, 2)] + [fleet.order(2, 1)]
        assert [order.gpus for order in orders] == [("5",), ("5",), ("6",)]
        for order in orders:
            assert order.environment["CUDA_VISIBLE_DEVICES"] == ",".join(order.gpus)
        assert [engine["gpus"] for engine in status_of(fleet)["engines"]] == [["4"], ["5"], ["6"]]


async def test_the_operators_policy_places_the_streams(runtime: RuntimeDir, tmp_path: Path) -> None:
    with fleet_of(runtime, tmp_path, PlacementChoices(policy="round_robin")) as fleet:
        assert isinstance(fleet.driver._policy, RoundRobin)
        assert fleet.driver.outlook is fleet.placing.outlook
