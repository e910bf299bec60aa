"""What a client may ask of the placement, and how headers say it.

| header | values | becomes |
|---|---|---|
| `X-Zero-Layer-Preference` | `low-latency`, `high-throughput`, `cost-optimal` | `preference` |
| `x-kernel-hint` (older clients) | see KERNEL_HINTS | `preference` or `contiguous` |
| `x-precision-preference` (older clients) | see PRECISIONS | domains of that label first |
| `x-model-hint` (older clients) | a model's name | domains of that label first |

One process serves one model in one precision, so what the last two name is a label that the
operator gave a domain (`dispatch.choices`): engines that run a model's FP8 kernels well, or cheap
ones.

The new header wins over `x-kernel-hint`. Names and values are compared without regard to case, `_`
and `-` are the same. A hint never makes a request fail: where no label matches, it has no effect.
A value that is not in the table is a ConfigError, which the caller answers with 400.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.choices import NO_HINT
from zerolayer.dispatch.memory_fit import KV_BYTES
from zerolayer.dispatch.policies.base import PlacementRequest, Preference

PREFERENCE_HEADER = "x-zero-layer-preference"
KERNEL_HEADER = "x-kernel-hint"
PRECISION_HEADER = "x-precision-preference"
MODEL_HEADER = "x-model-hint"
MODEL_NAME_MAX = 256
"""Characters of a model hint. A longer one is refused."""


class KernelHint(StrEnum):
    """Values of `x-kernel-hint`: the tuning profiles and fusion levels of older clients."""

    LATENCY = "latency-optimized"
    THROUGHPUT = "throughput-optimized"
    MEMORY = "memory-efficient"
    AGGRESSIVE = "aggressive"
    BALANCED = "balanced"
    CONSERVATIVE = "conservative"


KERNEL_PREFERENCES = {
    KernelHint.LATENCY: Preference.LOW_LATENCY,
    KernelHint.THROUGHPUT: Preference.HIGH_THROUGHPUT,
    KernelHint.MEMORY: Preference.COST_OPTIMAL,
}
"""Tuning profiles; the fusion levels say nothing of latency or cost."""
PRECISIONS = (*KV_BYTES, NO_HINT)
"""Values of `x-precision-preference`; `auto` asks for nothing."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What the headers of one request ask for."""

    preference: Preference = Preference.BALANCED
    contiguous: bool = False
    """Aggressive fusion: memory in one piece is worth something (`memory_fit`)."""
    precision: str | None = None
    model: str | None = None


def hints_from_headers(headers: Mapping[str, str]) -> Hints:
    """Read the four headers; absent ones change nothing.

    Raises ConfigError that names the header, its value and the values that are allowed.
    """
    found = {name.lower(): value.strip() for name, value in headers.items()}
    hints = _with_kernel(Hints(), found.get(KERNEL_HEADER))
    if (wanted := found.get(PREFERENCE_HEADER)) is not None:
        preference = Preference(_one_of("X-Zero-Layer-Preference", wanted, list(Preference)))
        hints = replace(hints, preference=preference)
    if (wanted := found.get(PRECISION_HEADER)) is not None:
        precision = _one_of(PRECISION_HEADER, wanted, PRECISIONS)
        hints = replace(hints, precision=None if precision == NO_HINT else precision)
    if (wanted := found.get(MODEL_HEADER)) is not None:
        if not 0 < len(wanted) <= MODEL_NAME_MAX:
            raise ConfigError(MODEL_HEADER, wanted[:40], f"give 1 to {MODEL_NAME_MAX} characters")
        hints = replace(hints, model=None if _plain(wanted) == NO_HINT else wanted)
    return hints


def apply_hints(
    request: PlacementRequest, hints: Hints, labels: Mapping[int, Collection[str]]
) -> PlacementRequest:
    """`request` with what `hints` ask for. `labels`: of each domain that has some, by its
    number."""
    return replace(
        request,
        preference=hints.preference,
        contiguous=hints.contiguous,
        preferred_domains=_matching(hints, labels),
    )


def _matching(hints: Hints, labels: Mapping[int, Collection[str]]) -> frozenset[int]:
    """Domains that match; those of the right model and precision, or of the model alone where none
    has both. Empty when no domain matches, or nothing was asked."""
    by_model, by_precision = _labelled(hints.model, labels), _labelled(hints.precision, labels)
    return (by_model & by_precision) or by_model or by_precision


def _labelled(word: str | None, labels: Mapping[int, Collection[str]]) -> frozenset[int]:
    if word is None:
        return frozenset()
    wanted = _plain(word)
    return frozenset(
        domain for domain, own in labels.items() if any(_plain(label) == wanted for label in own)
    )


def _with_kernel(hints: Hints, value: str | None) -> Hints:
    if value is None:
        return hints
    hint = KernelHint(_one_of(KERNEL_HEADER, value, list(KernelHint)))
    if hint in KERNEL_PREFERENCES:
        return replace(hints, preference=KERNEL_PREFERENCES[hint])
    return replace(hints, contiguous=hint is KernelHint.AGGRESSIVE)


def _one_of(header: str, value: str, allowed: list[str] | tuple[str, ...]) -> str:
    plain = _plain(value)
    if plain not in allowed:
        raise ConfigError(header, value, f"write one of: {', '.join(allowed)}")
    return plain


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
