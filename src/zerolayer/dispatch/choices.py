"""What an operator chooses about placement: policy, admission, domains, drain rule."""

from dataclasses import dataclass, field
from enum import StrEnum

from zerolayer.core.errors import ConfigError
from zerolayer.core.limits import ENGINES_MAX
from zerolayer.dispatch.drain_rule import DrainThresholds

DEFAULT_POLICY = "zerolayer"
MARGIN_UTIL, MARGIN_MEM = 0.07, 0.07
"""The drain rule's lower marks are so far below its upper ones."""
SAMPLES_MAX = 1000

Domains = tuple[tuple[int, ...], ...]


class Admission(StrEnum):
    """What happens to a new request when every engine is over its limits."""

    QUEUE = "queue"
    """It goes to the least bad engine and waits there."""
    REJECT = "reject"
    """It is answered with 429 and `Retry-After`."""


@dataclass(frozen=True, slots=True)
class PlacementChoices:
    """Settings of the placement of a serving process."""

    policy: str = DEFAULT_POLICY
    """A name of `dispatch.policies.registry`."""
    admission: Admission = Admission.QUEUE
    """Waiting is what clients of vLLM are used to."""
    domains: Domains = ()
    """Slots of each domain; slots that none names are one more domain. Empty: all are equal."""
    drain: DrainThresholds = field(default_factory=DrainThresholds)
    """When an engine counts as hot."""

    def domain_of(self, slot: int) -> int:
        """The domain's number of a slot, 0 for the first."""
        for number, slots in enumerate(self.domains):
            if slot in slots:
                return number
        return len(self.domains)


def parse_domains(text: str, field_name: str = "--domains") -> Domains:
    """`0,1;2,3` (slots; `e0,e1` is the same). Raises `ConfigError`; empty text is no domains."""
    fix = "write slots with commas and semicolons between domains, like 0,1;2,3"
    if not text.strip():
        return ()
    domains: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for part in text.split(";"):
        words = [word.strip().removeprefix("e") for word in part.split(",")]
        if not all(word.isascii() and word.isdigit() and len(word) <= 4 for word in words):
            raise ConfigError(field_name, text, fix)
        slots = tuple(int(word) for word in words)
        if max(slots) >= ENGINES_MAX:
            raise ConfigError(field_name, text, f"slots are 0 to {ENGINES_MAX - 1}")
        if len(set(slots)) < len(slots) or seen & set(slots):
            raise ConfigError(field_name, text, "name each slot once")
        seen |= set(slots)
        domains.append(slots)
    return tuple(domains)


def drain_thresholds(gpu_percent: float, memory_percent: float, samples: int) -> DrainThresholds:
    """The drain rule's marks from what was typed. Raises `ConfigError`."""
    for name, percent in (
        ("--drain-gpu-percent", gpu_percent),
        ("--drain-memory-percent", memory_percent),
    ):
        if not 10.0 <= percent <= 100.0:
            raise ConfigError(name, percent, "give a percentage from 10 to 100")
    if not 1 <= samples <= SAMPLES_MAX:
        raise ConfigError("--drain-samples", samples, f"give a whole number, 1 to {SAMPLES_MAX}")
    util, mem = gpu_percent / 100.0, memory_percent / 100.0
    return DrainThresholds(util, mem, samples, util - MARGIN_UTIL, mem - MARGIN_MEM)
