"""What NVML says of the GPUs that engines run on.

The library is vLLM's own copy of NVIDIA's `nvidia-ml-py`: vLLM finds its GPUs with it, so it is
there wherever an engine can run on one, and another copy could be of another version.

NVML's calls may block for milliseconds and a sick driver for ever: call `NvmlReader.read` in a
thread of its own (`counters`). Each call may be missing on a card, in a container or on a MIG
slice: a counter whose call failed is left out until an engine starts on that GPU anew.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import psutil
from vllm.logger import init_logger

from zerolayer.core.fleet_state import HardwareReport
from zerolayer.engines.picture import MEMORY_S

logger = init_logger("vllm.zerolayer.nvml")

NAMES = (
    "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth", "NVMLError",
    "NVML_SUCCESS", "NVML_ERROR_NOT_FOUND", "NVML_ERROR_GPU_IS_LOST", "NVML_PCIE_UTIL_TX_BYTES",
    "NVML_PCIE_UTIL_RX_BYTES",
)  # fmt: skip
"""Everything of the library that is used."""

PROCESS_WINDOW_US = 1_500_000
"""Samples of processes that are older say nothing of now. NVML takes one about every second."""
PCIE_LANE_BYTES_PER_S = (250e6, 500e6, 984.6e6, 1969.2e6, 3938.5e6, 7562.5e6)
"""Of generations 1 to 6, one way: 2.5 to 64 GT/s less the line code (8b/10b, from 3 on 128b/130b,
in 6 242 of 256 bytes); PCI-SIG's figures. A later generation counts as the last."""


class Counter(Enum):
    """A call that may fail by itself: its name, and what is used where it does."""

    BUSY = ("nvmlDeviceGetUtilizationRates", "the drain rule takes utilisation from streams")
    PROCESSES = (
        "nvmlDeviceGetComputeRunningProcesses", "other programs on it are not seen",
    )  # fmt: skip
    SHARES = ("nvmlDeviceGetProcessUtilization", "time that other programs take is not counted")
    PCIE = ("nvmlDeviceGetPcieThroughput", "link use is that of snapshots alone")


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """Where an engine runs."""

    incarnation: int
    words: tuple[str, ...]
    """As in `gpus.Gpus`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Shares are 0 to 1; None: not counted."""

    busy: float | None = None
    """Share of NVML's last sample period (1/6 to 1 s) in which any kernel ran."""
    foreign: float | None = None
    """Share of time that programs which are not ours can take from an engine here."""
    foreign_bytes: int | None = None
    """GPU memory that they have."""
    pcie: float | None = None
    """Busier direction of PCIe as a share of the link."""

    def report(self) -> HardwareReport:
        """What placement uses of it."""
        return HardwareReport(
            gpu_busy=-1.0 if self.busy is None else self.busy,
            foreign_util=self.foreign or 0.0,
            pcie_use=self.pcie or 0.0,
        )


NOTHING = Reading()


def load_nvml(library: Callable[[], Any] | None = None) -> Any | None:
    """The library, ready for calls; None where there is none or no driver behind it."""
    try:
        nvml = (library or _bundled)()
    except ImportError as error:
        logger.warning("GPU counters are not read: %s", error)
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.warning("GPU counters are not read: nvmlInit failed (%s)", error)
        return None
    return nvml


def is_own_process(pid: int) -> bool:
    """Whether it is this process or was started by it, however indirectly."""
    with contextlib.suppress(psutil.Error):
        return pid == os.getpid() or any(
            parent.pid == os.getpid() for parent in psutil.Process(pid).parents()
        )
    return False


class NvmlReader:
    """Reads each GPU once, however many engines are on it."""

    def __init__(self, nvml: Any, is_ours: Callable[[int], bool] = is_own_process) -> None:
        self._nvml = nvml
        self._is_ours = is_ours
        self._lives: dict[int, int] = {}
        self._devices: dict[str, _Device | None] = {}
        self._said: set[str] = set()

    def read(
        self, engines: Mapping[int, EngineGpus], now_ns: int, unix_us: int
    ) -> dict[int, Reading]:
        """By slot. An engine with several GPUs is as busy as the busiest of them, since each step
        waits for all. `now_ns`: monotonic; `unix_us`: wall time, which NVML stamps samples with."""
        self._forget(engines)
        words = {word for engine in engines.values() for word in engine.words}
        devices = {word: self._device(word) for word in sorted(words)}
        readings = {
            word: NOTHING if device is None else device.read(now_ns, unix_us)
            for word, device in devices.items()
        }
        return {
            slot: _worst([readings[word] for word in engine.words])
            for slot, engine in engines.items()
        }

    def _forget(self, engines: Mapping[int, EngineGpus]) -> None:
        """What failed on a GPU is tried again when an engine starts there anew."""
        for slot, engine in engines.items():
            if self._lives.get(slot) != engine.incarnation:
                for word in engine.words:
                    self._devices.pop(word, None)
        self._lives = {slot: engine.incarnation for slot, engine in engines.items()}

    def _device(self, word: str) -> "_Device | None":
        if word not in self._devices:
            self._devices[word] = self._found(word)
        return self._devices[word]

    def _found(self, word: str) -> "_Device | None":
        nvml = self._nvml
        try:
            if word.isdecimal():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(word))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(word)
        except nvml.NVMLError as error:
            self._say(f"GPU {word} is not known to NVML ({error}): its counters are not read")
            return None
        return _Device(word, handle, nvml, self._is_ours, self._say)

    def _say(self, line: str) -> None:
        """Once, however often it happens."""
        if line not in self._said:
            self._said.add(line)
            logger.warning("%s", line)


class _Device:
    """One GPU or MIG slice, with the counters of it that still work."""

    def __init__(
        self,
        word: str,
        handle: Any,
        nvml: Any,
        is_ours: Callable[[int], bool],
        say: Callable[[str], None],
    ) -> None:
        self._word, self._handle, self._nvml = word, handle, nvml
        self._is_ours, self._say = is_ours, say
        self._off: set[Counter] = set()
        self._link_bytes_per_s = 0.0  # one way; 0 until it is known
        self._pcie: float | None = None
        self._looked_ns = 0

    def read(self, now_ns: int, unix_us: int) -> Reading:
        """All counters. PCIe takes NVML twice 20 ms."""
        busy = self._try(Counter.BUSY, self._busy)
        memory = self._try(Counter.PROCESSES, self._memory_by_pid) or {}
        foreign = foreign_bytes = None
        # Where NVML does not know our engines by the pids that we know (in a container with pids of
        # its own), it cannot be said who the others are.
        if any(map(self._is_ours, memory)):
            strangers = {pid: used for pid, used in memory.items() if not self._is_ours(pid)}
            foreign = self._try(Counter.SHARES, lambda: self._taken_by(strangers, unix_us))
            used = [each for each in strangers.values() if each is not None]
            foreign_bytes = sum(used) if len(used) == len(strangers) else None
        pcie = self._try(Counter.PCIE, self._pcie_share)
        return Reading(busy, foreign, foreign_bytes, self._mean_pcie(pcie, now_ns))

    def _try(self, counter: Counter, call: Callable[[], Any]) -> Any:
        if counter in self._off:
            return None
        try:
            return call()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._off.update(Counter)
                self._say(f"GPU {self._word}: {error}; none of its counters is read any more")
            else:
                self._off.add(counter)
                name, instead = counter.value
                self._say(f"GPU {self._word}: {name} failed ({error}); {instead}")
            return None

    def _busy(self) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0

    def _memory_by_pid(self) -> dict[int, int | None]:
        """GPU memory of each process in bytes; None where the driver does not tell."""
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(self._handle)
        return {int(each.pid): each.usedGpuMemory for each in running}

    def _taken_by(self, strangers: Iterable[int], unix_us: int) -> float:
        """The share of time that these can take from one engine.

        NVML counts a program's kernels as we count `busy`: one that is alone is at 100 % with
        little to do. The driver gives programs that want the GPU at once equal slices of its time,
        so k of them take at most k / (k + 1) from one more, and no more than they use now.
        """
        shares = self._sm_by_pid(unix_us)
        taken = [shares[pid] for pid in strangers if shares.get(pid)]
        return min(sum(taken), len(taken) / (len(taken) + 1.0))

    def _sm_by_pid(self, unix_us: int) -> dict[int, float]:
        nvml, since_us = self._nvml, unix_us - PROCESS_WINDOW_US
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                raise
            samples = []  # nobody used it in that time
        # Some drivers hand out cells that they have not filled, with any number in them.
        filled = [each for each in samples if each.timeStamp > since_us and each.smUtil <= 100]
        filled.sort(key=lambda each: int(each.timeStamp))
        return {int(each.pid): float(each.smUtil) / 100.0 for each in filled}

    def _pcie_share(self) -> float:
        nvml, handle = self._nvml, self._handle
        if not self._link_bytes_per_s:
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
            table = PCIE_LANE_BYTES_PER_S
            per_lane = table[min(max(1, generation), len(table)) - 1]
            self._link_bytes_per_s = max(1, lanes) * per_lane
        kilobytes = max(
            nvml.nvmlDeviceGetPcieThroughput(handle, direction)
            for direction in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return min(1.0, 1e3 * float(kilobytes) / self._link_bytes_per_s)

    def _mean_pcie(self, share: float | None, now_ns: int) -> float | None:
        """NVML looks at 20 ms only, so the mean of several looks counts."""
        passed_s, self._looked_ns = (now_ns - self._looked_ns) / 1e9, now_ns
        if share is None or self._pcie is None:
            self._pcie = share
        else:
            self._pcie += passed_s / (passed_s + MEMORY_S) * (share - self._pcie)
        return self._pcie


def _worst(readings: Sequence[Reading]) -> Reading:
    """Of the GPUs of one engine; memory is that of all of them."""
    used = [each.foreign_bytes for each in readings if each.foreign_bytes is not None]
    return Reading(
        busy=max((each.busy for each in readings if each.busy is not None), default=None),
        foreign=max((each.foreign for each in readings if each.foreign is not None), default=None),
        foreign_bytes=sum(used) if len(used) == len(readings) else None,
        pcie=max((each.pcie for each in readings if each.pcie is not None), default=None),
    )


def _bundled() -> Any:
    from vllm.third_party import pynvml

    return pynvml
