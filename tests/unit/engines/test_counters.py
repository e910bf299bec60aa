import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.unit.engines.fake_nvml import Card, FakeNvml
from zerolayer.core.fleet_state import FleetState
from zerolayer.engines import counters as counters_module
from zerolayer.engines.counters import STALE_S, Counters, Sample, Sampler
from zerolayer.engines.gpus import NO_GPUS, Gpus
from zerolayer.engines.nvml import NOTHING, Reading

SECOND_NS = 10**9
GPUS = Gpus(("4", "5", "6", "7"), each=2)
BESIDE = Reading(busy=0.97, foreign=0.25, foreign_bytes=7, pcie=0.5)


def supervisor(slot: int, live: bool = True) -> Any:
    order = SimpleNamespace(incarnation=1, gpus=GPUS.of(slot))
    launched = SimpleNamespace(launched=SimpleNamespace(order=order))
    return SimpleNamespace(slot=slot, live=launched if live else None)


def fleet_of(gpus: Gpus = GPUS) -> Any:
    """Engine 0 up, engine 1 down."""
    return SimpleNamespace(
        settings=SimpleNamespace(gpus=gpus),
        driver=SimpleNamespace(fleet=FleetState(2)),
        supervisors=[supervisor(0), supervisor(1, live=False)],
    )


def looked(fleet: Any) -> Counters:
    each = Counters(fleet)
    each._engines = each._gpus()
    return each


class Seen(Sampler):
    """A thread that was never started and has this to say."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.newest = sample
        self.started = self.stopped = False

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.stopped = True


async def test_without_an_nvidia_gpu_no_thread_is_started() -> None:
    sampler = Seen(Sample(0))
    await Counters(fleet_of(NO_GPUS)).run(sampler)
    assert not sampler.started


async def test_without_nvml_the_job_ends_and_everything_is_as_without_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters_module, "EVERY_S", 0.0)
    fleet = fleet_of()
    sampler = Sampler(lambda: None)
    await asyncio.wait_for(Counters(fleet).run(sampler), 10.0)
    untouched = vars(FleetState(2))
    for name, value in vars(fleet.driver.fleet).items():
        assert np.array_equal(value, untouched[name]), name


def test_a_look_goes_to_the_engines_that_are_up() -> None:
    fleet = fleet_of()
    each = looked(fleet)
    each.take(Sample(SECOND_NS, {0: BESIDE, 1: BESIDE}), SECOND_NS)
    load = fleet.driver.fleet
    assert load.gpu_busy.tolist() == [0.97, -1.0]
    assert load.foreign_util.tolist() == [0.25, 0.0]
    assert load.pcie_use.tolist() == [0.5, 0.0]
    assert load.has_neighbours
    assert each.shown(0) == {"busy": 0.97, "foreign": 0.25, "foreign_bytes": 7, "pcie": 0.5}
    assert each.shown(1) is None


def test_what_a_hanging_driver_said_last_is_forgotten_after_a_while() -> None:
    fleet = fleet_of()
    each = looked(fleet)
    sample = Sample(SECOND_NS, {0: BESIDE})
    each.take(sample, SECOND_NS + int(STALE_S * 1e9))
    assert fleet.driver.fleet.has_neighbours
    each.take(sample, SECOND_NS + int(STALE_S * 1e9) + 1)
    assert not fleet.driver.fleet.has_neighbours
    assert fleet.driver.fleet.gpu_busy.tolist() == [-1.0, -1.0]
    assert each.shown(0) is None
    each.take(Sample(9 * SECOND_NS, {0: BESIDE}), 9 * SECOND_NS)
    assert fleet.driver.fleet.has_neighbours, "a driver that answers again is believed again"


def test_an_engine_of_which_nothing_is_counted_shows_nothing() -> None:
    each = looked(fleet_of())
    each.take(Sample(SECOND_NS, {0: NOTHING}), SECOND_NS)
    assert each.shown(0) is None


async def test_a_driver_that_never_answers_keeps_neither_the_fleet_nor_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters_module, "EVERY_S", 0.0)
    asked, answer = threading.Event(), threading.Event()

    def hang() -> FakeNvml:
        asked.set()
        answer.wait()
        return FakeNvml()

    job = asyncio.ensure_future(Counters(fleet_of()).run(Sampler(hang)))
    try:
        assert await asyncio.get_running_loop().run_in_executor(None, asked.wait, 10.0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
    finally:
        answer.set()


def test_the_thread_reads_what_it_is_given_and_shuts_nvml_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters_module, "EVERY_S", 0.0)
    nvml = FakeNvml(_4=Card(busy=40), _5=Card(busy=60))
    sampler = Sampler(lambda: nvml)
    sampler.engines = looked(fleet_of())._gpus()
    reads, rates = [0], nvml.nvmlDeviceGetUtilizationRates

    def stop_after_one(card: Card) -> Any:
        reads[0] += 1
        if reads[0] == 2:
            sampler.stop()
        return rates(card)

    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", stop_after_one)
    sampler._run()
    assert sampler.newest.readings[0].busy == 0.6
    assert nvml.calls["nvmlShutdown"] == 1
    assert sampler.gone


def test_a_fault_in_reading_ends_the_thread_and_nothing_else() -> None:
    def broken() -> Any:
        raise ValueError("a driver of another planet")

    sampler = Sampler(broken)
    sampler._run()
    assert sampler.gone
