"""Where a request's KV fits: free tokens, and the largest run of them in one piece.

vLLM's cache is paged: any free blocks will do, so what decides is how many are free. A run in one
piece makes restoring a snapshot one large copy, and is what a request that prefers contiguous
memory (aggressive fusion) is given first.
"""

from dataclasses import dataclass

import numpy as np

from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import Bools, FleetState, Floats

KV_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one number of a key or a value."""

UNKNOWN_TOKENS = 1e15
"""More than any cache has, and finite: a full cache of unknown size then has 0 free tokens."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Arrays of shape `(engines,)`."""

    fits: Bools
    """Enough tokens are free."""
    in_one_piece: Bools
    """The largest free run alone is long enough."""
    score: Floats
    """Smaller is better: tokens needed / tokens free. Above 1 it does not fit; 1 more for every
    engine without a run of that length when one piece is preferred."""


def kv_bytes_per_token(precision: str, layers: int, kv_heads: int, head_size: int) -> float:
    """2 (key and value) * layers * kv_heads * head_size * bytes of a number.

    Raises ConfigError for a precision that KV_BYTES does not have.
    """
    return 2.0 * layers * kv_heads * head_size * _bytes(precision)


def free_tokens(fleet: FleetState) -> Floats:
    """Free KV of each engine in tokens of its own precision; UNKNOWN_TOKENS stands for a capacity
    that is not known."""
    free: Floats = (1.0 - fleet.kv_used_fraction) * np.minimum(fleet.kv_tokens, UNKNOWN_TOKENS)
    return free


def find_best_fit(
    fleet: FleetState,
    token_count: int,
    precision: str = "bf16",
    *,
    contiguous: bool = False,
    cache_precision: str = "bf16",
) -> Fit:
    """How well `token_count` tokens of KV fit on each engine.

    `precision`: of the request's KV; `cache_precision`: in which the engines count their capacity.
    `contiguous`: one piece is preferred (it is never demanded). Raises ConfigError for an unknown
    precision.
    """
    needed = max(1, token_count) * _bytes(precision) / _bytes(cache_precision)
    free = free_tokens(fleet)
    fits = free >= needed
    in_one_piece = fits & (fleet.free_run_tokens >= needed)
    score: Floats = needed / np.maximum(free, 1e-9)
    if contiguous:
        score += np.where(in_one_piece, 0.0, 1.0)
    return Fit(fits, in_one_piece, score)


def best_engine(fit: Fit, among: Bools) -> int | None:
    """The engine of `among` with the best fit; None when it fits nowhere there."""
    scores = np.where(fit.fits & among, fit.score, np.inf)
    engine = int(scores.argmin())
    return engine if scores[engine] < np.inf else None


def _bytes(precision: str) -> float:
    try:
        return KV_BYTES[precision]
    except KeyError:
        fix = f"write one of: {', '.join(KV_BYTES)}"
        raise ConfigError("precision", precision, fix) from None
