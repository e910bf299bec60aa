"""What an operator chooses about placement: policy, admission, domains, drain rule."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from zerolayer.core.errors import ConfigError
from zerolayer.core.limits import ENGINES_MAX
from zerolayer.dispatch.drain_rule import DrainThresholds

DEFAULT_POLICY = "zerolayer"
MARGIN_UTIL, MARGIN_MEM = 0.07, 0.07
"""The drain rule's lower marks are so far below its upper ones."""
SAMPLES_MAX = 1000

NO_HINT = "auto"
"""As a precision or a model it is the same as no header, so it is no label."""
LABEL_CHARS_MAX = 64
"""Characters of a domain's label."""
_LABEL = re.compile(rf"[a-z0-9._-]{{1,{LABEL_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class Domain:
    """Engines that count as equal, and what clients may call them."""

    slots: tuple[int, ...]
    labels: tuple[str, ...] = ()
    """Names that hints of clients are compared with (`dispatch.preference`)."""


Domains = tuple[Domain, ...]


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
    """Slots that none names are one more domain, without a label. Empty: all are equal."""
    drain: DrainThresholds = field(default_factory=DrainThresholds)
    """When an engine counts as hot."""

    def domain_of(self, slot: int) -> int:
        """The domain's number of a slot, 0 for the first."""
        for number, domain in enumerate(self.domains):
            if slot in domain.slots:
                return number
        return len(self.domains)

    def labels_of(self, slot: int) -> tuple[str, ...]:
        """The labels of a slot's domain, also of a slot that is not there yet."""
        number = self.domain_of(slot)
        return self.domains[number].labels if number < len(self.domains) else ()

    @property
    def labels(self) -> Mapping[int, tuple[str, ...]]:
        """The labels of each domain that has some, by its number."""
        return {number: each.labels for number, each in enumerate(self.domains) if each.labels}


def parse_domains(text: str, field_name: str = "--domains") -> Domains:
    """`0,1;2,3` (slots; `e0,e1` is the same), each domain with its labels in front where it has
    some: `fp8+cheap=0,1;bf16=2,3`. Raises `ConfigError`; empty text is no domains."""
    if not text.strip():
        return ()
    domains: list[Domain] = []
    seen: set[int] = set()
    for part in text.split(";"):
        before, equals, after = part.partition("=")
        slots = _slots(after if equals else before, text, field_name)
        if seen & set(slots):
            raise ConfigError(field_name, text, "name each slot once")
        seen |= set(slots)
        domains.append(Domain(slots, _labels(before, field_name) if equals else ()))
    return tuple(domains)


def _slots(part: str, text: str, field_name: str) -> tuple[int, ...]:
    words = [word.strip().removeprefix("e") for word in part.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 4 for word in words):
        fix = "write slots with commas and semicolons between domains, like 0,1;2,3 or fp8=0,1;2,3"
        raise ConfigError(field_name, text, fix)
    slots = tuple(int(word) for word in words)
    if max(slots) >= ENGINES_MAX:
        raise ConfigError(field_name, text, f"slots are 0 to {ENGINES_MAX - 1}")
    if len(set(slots)) < len(slots):
        raise ConfigError(field_name, text, "name each slot once")
    return slots


def _labels(part: str, field_name: str) -> tuple[str, ...]:
    labels = tuple(word.strip() for word in part.split("+"))
    for label in labels:
        if not _LABEL.fullmatch(label):
            fix = f"write labels of 1 to {LABEL_CHARS_MAX} of a-z, 0-9, '.', '-' and '_', with + "
            raise ConfigError(field_name, label[: LABEL_CHARS_MAX + 1], f"{fix}between them")
        if label == NO_HINT:
            raise ConfigError(field_name, label, f"choose another label: {NO_HINT} asks for none")
    if len(set(labels)) < len(labels):
        raise ConfigError(field_name, part, "write each label of a domain once")
    return labels


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
