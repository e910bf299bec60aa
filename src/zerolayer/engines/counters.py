"""Takes what NVML says of each engine's GPUs over into the fleet's state, twice a second.

A thread of its own asks NVML: its calls block, and with a sick driver for ever. It is a daemon, so
even then the fleet serves and ends as it would; what has not been renewed for `STALE_S` counts no
more. Without an NVIDIA GPU there is no thread.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from zerolayer.core.fleet_state import NO_COUNTERS
from zerolayer.engines.nvml import NOTHING, EngineGpus, NvmlReader, Reading, load_nvml

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

logger = init_logger("vllm.zerolayer.counters")

EVERY_S = 0.5
STALE_S = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at all GPUs."""

    at_ns: int
    """Monotonic, of its end."""
    readings: Mapping[int, Reading] = field(default_factory=dict)
    """By slot."""


class Sampler:
    """The thread. `engines` goes in and `newest` comes out, each replaced whole."""

    def __init__(self, load: Callable[[], Any | None] = load_nvml) -> None:
        self._load = load
        self._ended = threading.Event()
        self.gone = False
        """There is no NVML: nothing will come."""
        self.engines: Mapping[int, EngineGpus] = {}
        self.newest = Sample(time.monotonic_ns())

    def start(self) -> None:
        """Begin to look, until `stop`."""
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """End after the look that is under way, if that ever ends. Does not wait."""
        self._ended.set()

    def _run(self) -> None:
        try:
            nvml = self._load()
            if nvml is not None:
                self._look_until_stopped(nvml)
        except Exception:  # the fleet serves without counters; the line says what is to be mended
            logger.exception("GPU counters are not read any more")
        self.gone = True

    def _look_until_stopped(self, nvml: Any) -> None:
        reader = NvmlReader(nvml)
        while not self._ended.wait(EVERY_S):
            readings = reader.read(self.engines, time.monotonic_ns(), time.time_ns() // 1000)
            self.newest = Sample(time.monotonic_ns(), readings)
        nvml.nvmlShutdown()


class Counters:
    """A job of the fleet, and what the status shows of it."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._engines: dict[int, EngineGpus] = {}
        self._readings: Mapping[int, Reading] = {}
        self._stale = False

    async def run(self, sampler: Sampler | None = None) -> None:
        """Work for ever; end at once where engines have no GPUs."""
        if not self._fleet.settings.gpus.visible:
            return
        sampler = sampler or Sampler()
        sampler.start()
        try:
            while not sampler.gone:
                await asyncio.sleep(EVERY_S)
                sampler.engines = self._engines = self._gpus()
                self.take(sampler.newest, time.monotonic_ns())
        finally:
            sampler.stop()
            self.take(Sample(0), 0)

    def take(self, sample: Sample, now_ns: int) -> None:
        """Use this look, or none where it is too old."""
        stale = now_ns - sample.at_ns > STALE_S * 1e9
        if stale != self._stale:
            self._stale = stale
            how = f"has not answered for {STALE_S:.0f} s: its counters are" if stale else (
                "answers again: its counters are no longer"
            )  # fmt: skip
            logger.warning("NVML %s left out", how)
        self._readings = {} if stale else sample.readings
        load = self._fleet.driver.fleet
        for slot in range(load.engines):
            reading = self._readings.get(slot) if slot in self._engines else None
            load.hardware(slot, reading.report() if reading is not None else NO_COUNTERS)

    def shown(self, slot: int) -> dict[str, Any] | None:
        """Of one engine, as plain JSON values; None where nothing is read of it."""
        reading, engine = self._readings.get(slot, NOTHING), self._engines.get(slot)
        if engine is None or reading == NOTHING:
            return None
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(reading).items()
        }

    def _gpus(self) -> dict[int, EngineGpus]:
        """Of the engines that are up."""
        found: dict[int, EngineGpus] = {}
        for supervisor in self._fleet.supervisors:
            if supervisor.live is not None:
                order = supervisor.live.launched.order
                found[supervisor.slot] = EngineGpus(order.incarnation, order.gpus)
        return found
