"""A stand-in for NVML with the names, units and errors of vLLM's bundled `pynvml`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NOT_FOUND, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 6, 12, 15
TEXTS = {3: "Not Supported", 6: "Not Found", 12: "NVML Shared Library Not Found", 15: "GPU is lost"}
GIB = 1 << 30


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(TEXTS.get(value, str(value)))
        self.value = value


@dataclass
class Card:
    """One GPU or MIG slice; percentages and KB/s as NVML gives them."""

    busy: int = 0
    memory: dict[int, int | None] = field(default_factory=dict)
    """Bytes by pid."""
    sm: list[tuple[int, int, int]] = field(default_factory=list)
    """(pid, timestamp in us, percent) of each sample."""
    pcie: tuple[int, int] = (0, 0)
    """(sent, received)."""
    fails: dict[str, int] = field(default_factory=dict)
    """Error of a call by the end of its name."""


class FakeNvml:
    NVMLError = FakeError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_FOUND = NOT_FOUND
    NVML_ERROR_GPU_IS_LOST = GPU_IS_LOST
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    def __init__(self, **cards: Card) -> None:
        """Cards by index (`_0`) or UUID (`-` written as `_`)."""
        self.cards = {name.lstrip("_").replace("_", "-"): card for name, card in cards.items()}
        self.calls: Counter[str] = Counter()
        self.init: Callable[[], None] = lambda: None

    def nvmlInit(self) -> None:  # noqa: N802
        self.init()

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls["nvmlShutdown"] += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        assert isinstance(index, int)
        return self._handle(str(index))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        assert not uuid.isdecimal()
        return self._handle(uuid)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        self._called(card, "UtilizationRates")
        return SimpleNamespace(gpu=card.busy, memory=0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: Card) -> Any:  # noqa: N802
        self._called(card, "RunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.memory.items()]

    def nvmlDeviceGetProcessUtilization(self, card: Card, since_us: int) -> Any:  # noqa: N802
        self._called(card, "ProcessUtilization")
        rows = [row for row in card.sm if row[1] > since_us]
        if not rows:
            raise FakeError(NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=sm) for pid, at, sm in rows]

    def nvmlDeviceGetPcieThroughput(self, card: Card, direction: int) -> int:  # noqa: N802
        self._called(card, "PcieThroughput")
        return card.pcie[direction]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:  # noqa: N802
        self._called(card, "LinkGeneration")
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:  # noqa: N802
        self._called(card, "LinkWidth")
        return 16

    def _handle(self, word: str) -> Card:
        self.calls["handle"] += 1
        if word not in self.cards:
            raise FakeError(NOT_FOUND)
        return self.cards[word]

    def _called(self, card: Card, call: str) -> None:
        self.calls[call] += 1
        if call in card.fails:
            raise FakeError(card.fails[call])
