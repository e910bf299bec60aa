"""Compares a disturbed run with its undisturbed reference, and describes gaps. Pure.

A difference alone does not say what went wrong, so the tokens behind it are looked at: if they go
on somewhere later in the reference, tokens were *lost*; if they go on somewhere earlier, tokens
were *repeated*; if neither, it is *other text* (the model chose differently, nothing is missing).
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

SHIFT_MAX = 64
"""Largest number of tokens that a loss or a repetition is looked for; more is other text."""
MATCH_TOKENS = 8
"""So many tokens in a row must agree before a shift counts as a loss or a repetition."""
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one run has that its reference has not, and the other way round."""

    exact: bool
    """Equal token by token, to the end."""
    first_difference: int | None
    """Index of the first token that differs or is missing; None when exact."""
    lost: int
    """Tokens of the reference that never came."""
    repeated: int
    """Tokens that came once more than in the reference."""
    other_text: bool
    """Both go on, with different tokens: nothing is missing, the model chose differently."""


def compare(reference: Sequence[int], got: Sequence[int], *, finished: bool = True) -> Comparison:
    """Compare token ids. `finished`: the run ended by itself; else all that is missing is lost."""
    at = _first_difference(reference, got)
    if at is None:
        return Comparison(True, None, 0, 0, False)
    missing = len(reference) - len(got)
    if at == len(got):
        return Comparison(False, at, missing, 0, False)
    if at == len(reference):
        return Comparison(False, at, 0, -missing, False)
    if missing == 0 and list(reference[-MATCH_TOKENS:]) == list(got[-MATCH_TOKENS:]):
        return Comparison(False, at, 0, 0, True)  # they meet again in step: nothing was shifted
    lost = _shift(reference, got, at)
    repeated = _shift(got, reference, at)
    if lost or repeated:
        first_loss = lost != 0 and (repeated == 0 or lost <= repeated)
        return Comparison(
            False, at, lost if first_loss else 0, 0 if first_loss else repeated, False
        )
    return Comparison(False, at, 0 if finished else max(0, missing), 0, True)


def _first_difference(reference: Sequence[int], got: Sequence[int]) -> int | None:
    for at, (wanted, token) in enumerate(zip(reference, got, strict=False)):
        if wanted != token:
            return at
    return None if len(reference) == len(got) else min(len(reference), len(got))


def _shift(ahead: Sequence[int], behind: Sequence[int], at: int) -> int:
    """How many tokens of `ahead` must be left out at `at` so that both go on alike; 0: never."""
    for shift in range(1, SHIFT_MAX + 1):
        window = min(len(behind) - at, len(ahead) - at - shift)
        if window < MATCH_TOKENS:
            return 0
        if list(ahead[at + shift : at + shift + window]) == list(behind[at : at + window]):
            return shift
    return 0


def gaps_ms(arrivals_ns: Sequence[int]) -> list[float]:
    """Milliseconds between one token's arrival and the next; one fewer than there are tokens."""
    return [(after - before) / NS_PER_MS for before, after in itertools.pairwise(arrivals_ns)]


def worst_gap_ms(arrivals_ns: Sequence[int]) -> float:
    """The longest silence between two tokens, in ms; 0 with fewer than two."""
    return max(gaps_ms(arrivals_ns), default=0.0)


@dataclass(frozen=True, slots=True)
class FaultGaps:
    """The silences of one stream around a fault, in ms."""

    at_fault_ms: float | None
    """The silence into which the fault's moments fall (the longest, if several); None where no
    token came after one of them."""
    other_ms: float
    """The longest other silence from the fault on: what the fault's healing costs."""


def gaps_around(arrivals_ns: Sequence[int], struck_ns: int, moments_ns: Sequence[int]) -> FaultGaps:
    """Split the gaps of a stream by a fault at `struck_ns` that was declared at `moments_ns`.

    A fault's own moment does not say which gap it made (a token that was under way may still come
    after it); the moment at which it was declared does, as nothing of the old engine passes later.
    """
    inside: set[int] = set()
    ended = False
    for moment_ns in moments_ns:
        after = bisect.bisect_right(arrivals_ns, moment_ns)
        if after == len(arrivals_ns):
            ended = True
        elif after > 0:
            inside.add(after)
    at_fault = [(arrivals_ns[i] - arrivals_ns[i - 1]) / NS_PER_MS for i in inside]
    first = max(1, bisect.bisect_right(arrivals_ns, struck_ns))
    other = [
        (arrivals_ns[i] - arrivals_ns[i - 1]) / NS_PER_MS
        for i in range(first, len(arrivals_ns))
        if i not in inside
    ]
    return FaultGaps(
        None if ended else max(at_fault, default=0.0),
        max(other, default=0.0),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` (0..1] of all do not exceed."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share {share} is outside (0, 1]")
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float], digits: int = 1) -> dict[str, float | int | None]:
    """`{count, p50, p99, max}` of some values, rounded; None where there is none."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, digits)

    return {
        "count": len(values),
        "p50": rounded(percentile(values, 0.5)),
        "p99": rounded(percentile(values, 0.99)),
        "max": rounded(max(values, default=None)),
    }
