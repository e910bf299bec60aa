"""How long answers are, learned from those that finished lately.

Lengths fall into log-spaced buckets; each new one weighs a little more than the one before, which
is exponential forgetting without touching the old weights. Inside a bucket every length is equally
likely, so survival `S(x) = P(length > x)` is linear between bucket ends, and
`E[length - d | length > d] = sum_{x >= d} S(x) / S(d)` (the mean residual life) has a closed form
per bucket.

Answers that still run count too, as longer than they are so far: without them a distribution
learned from finished answers alone knows only the short ones at first, and after every change.
Survival is the life-table estimate, the product over buckets of
1 - ended / (reached - half of those that are just inside) (Kaplan and Meier, "Nonparametric
estimation from incomplete observations", JASA 1958). It needs a memory that is much longer than an
answer takes, or it counts the beginnings of long answers and not the short ones of that time.

Until enough answers have ended a heavy-tailed prior speaks (Lomax with exponent 2: the longer an
answer is already, the longer it will still be). It keeps a small weight for ever, so that a stream
longer than any before it still has an expected rest.
"""

from bisect import bisect_right
from math import exp

import numpy as np

from zerolayer.core.fleet_state import Floats

TOKENS_MAX = 1 << 18
"""Longest answer that is told apart; longer ones count as this long."""
BUCKETS_PER_DOUBLING = 8
"""A bucket is 9 % wide, so a mean is at most half of that off."""
MEMORY_REQUESTS = 1000.0
MEMORY_S = 600.0
"""A finished request weighs 1/e of a new one after so many requests, and not before so many
seconds."""
PRIOR_MEAN_TOKENS = 128.0
PRIOR_REQUESTS = 2.0
"""The prior weighs as much as so many finished requests."""
NEAR_TOKENS = 4096
"""Up to here survival is also kept per token."""
REBUILD_EVERY = 32
"""Finished requests between two builds of the tables (fewer at first): a table of a thousand
requests does not change by more than 3 % meanwhile."""

_WEIGHT_MAX = 1e200


def _edges() -> Floats:
    exponents = np.arange(0, 18 * BUCKETS_PER_DOUBLING + 1) / BUCKETS_PER_DOUBLING
    return np.unique(np.round(2.0**exponents))


_EDGES = _edges()  # bucket k holds the lengths _EDGES[k] to _EDGES[k + 1] - 1
_KNOTS = np.append(_EDGES - 1.0, TOKENS_MAX)  # where survival is tabulated; linear in between
_NEAR = np.arange(NEAR_TOKENS + 1, dtype=np.float64)
_BUCKET_OF = np.searchsorted(_KNOTS, _NEAR, side="right") - 1
_EDGE_LIST: list[float] = _EDGES.tolist()
_KNOT_LIST: list[float] = _KNOTS.tolist()


def _prior() -> Floats:
    """Weight of each bucket under the Lomax prior; sums to PRIOR_REQUESTS."""
    survival = (1.0 + _KNOTS / PRIOR_MEAN_TOKENS) ** -2.0
    survival[-1] = 0.0
    weights: Floats = -np.diff(survival) * PRIOR_REQUESTS
    return weights


_PRIOR = _prior()


class OutputLengths:
    """Distribution of output lengths in tokens. Queries are table look-ups."""

    def __init__(self) -> None:
        self._weights = np.zeros(len(_EDGES))
        self._running = np.zeros(len(_EDGES))
        self._next_weight = 1.0
        self._growth = exp(1.0 / MEMORY_REQUESTS)
        self._observed = 0
        self._rebuild_in = 1
        self._build()

    @property
    def observed(self) -> int:
        """Finished requests learned from."""
        return self._observed

    @property
    def mean(self) -> float:
        """Expected output tokens of a new request."""
        return max(1.0, 0.5 + self._integral[0])

    def observe(self, output_tokens: int) -> None:
        """A request finished with this many tokens; fewer than 1 is ignored."""
        if output_tokens < 1:
            return
        bucket = bisect_right(_EDGE_LIST, min(output_tokens, TOKENS_MAX)) - 1
        self._weights[bucket] += self._next_weight
        self._next_weight *= self._growth
        self._observed += 1
        if self._next_weight > _WEIGHT_MAX:
            self._weights /= self._next_weight
            self._next_weight = 1.0
        self._rebuild_in -= 1
        if self._rebuild_in <= 0:
            self._rebuild_in = min(REBUILD_EVERY, 1 + self._observed // 8)
            self._build()

    def running(self, delivered: Floats, requests_per_s: float) -> None:
        """All answers that run now, by the tokens that have come of each; and how many come."""
        self._growth = exp(1.0 / max(MEMORY_REQUESTS, MEMORY_S * requests_per_s))
        near = np.minimum(delivered, NEAR_TOKENS).astype(np.int64)
        inside = _BUCKET_OF[near]
        far = delivered > NEAR_TOKENS
        if far.any():
            longest = np.minimum(delivered[far], TOKENS_MAX - 1.0)
            inside[far] = np.searchsorted(_KNOTS, longest, side="right") - 1
        self._running = np.bincount(inside, minlength=len(_EDGES)).astype(np.float64)
        self._build()

    def expected_remaining(self, delivered: int = 0) -> float:
        """E[tokens still to come | `delivered` have come and the answer goes on]; at least 1."""
        bucket, share = self._locate(delivered)
        if bucket < 0:
            return 1.0
        begin, end = self._survival[bucket], self._survival[bucket + 1]
        here = begin + share * (end - begin)
        width = _KNOT_LIST[bucket + 1] - _KNOT_LIST[bucket]
        rest = self._integral[bucket + 1] + (here + end) * 0.5 * (1.0 - share) * width
        return max(1.0, 0.5 + rest / here)

    def survival(self, delivered: int, further: float) -> float:
        """P(at least `further` more tokens | `delivered` have come and the answer goes on)."""
        now = self._at(delivered)
        return self._at(delivered + max(0.0, further)) / now if now > 0.0 else 0.0

    def quantile(self, q: float, delivered: int = 0) -> float:
        """Tokens still to come that are not exceeded with probability `q` (0 to 1)."""
        level = (1.0 - min(1.0, max(0.0, q))) * self._at(delivered)
        at = float(np.interp(-level, self._falling, _KNOTS))
        return max(0.0, at - max(0, delivered))

    def survival_at(self, tokens: Floats) -> Floats:
        """P(length > tokens) for any array of token counts of 0 and more; 1 at 0, 0 at TOKENS_MAX.

        Up to NEAR_TOKENS a table by whole tokens, which takes a tenth of the time.
        """
        nearest = np.minimum(tokens, NEAR_TOKENS)
        nearest += 0.5
        survival: Floats = self._near.take(nearest.astype(np.intp), mode="clip")
        if tokens.size and tokens.max() > NEAR_TOKENS:
            far = tokens > NEAR_TOKENS
            survival[far] = np.interp(tokens[far], _KNOTS, self._table)
        return survival

    def survival_sum(self, tokens: Floats) -> Floats:
        """Integral of survival from 0 to `tokens`: what a stream generates on average until then.

        Between two bucket ends it is taken to be linear, which is at most 1 % off.
        """
        sums: Floats = np.interp(tokens, _KNOTS, self._sums)
        return sums

    def _at(self, tokens: float) -> float:
        bucket, share = self._locate(tokens)
        if bucket < 0:
            return 0.0
        begin = self._survival[bucket]
        return begin + share * (self._survival[bucket + 1] - begin)

    @staticmethod
    def _locate(tokens: float) -> tuple[int, float]:
        """(bucket, how far into it); bucket -1 beyond the longest answer."""
        if tokens >= TOKENS_MAX:
            return -1, 0.0
        at = max(0.0, tokens)
        bucket = bisect_right(_KNOT_LIST, at) - 1
        begin = _KNOT_LIST[bucket]
        return bucket, (at - begin) / (_KNOT_LIST[bucket + 1] - begin)

    def _build(self) -> None:
        """Survival and its integral to the right, at every knot."""
        ended = self._weights / self._next_weight + _PRIOR
        reached = np.cumsum((ended + self._running)[::-1])[::-1]
        goes_on = np.maximum(0.0, 1.0 - ended / (reached - 0.5 * self._running))
        goes_on[-1] = 0.0
        self._table = np.append(1.0, np.cumprod(goes_on))
        self._falling = -self._table
        self._near = np.interp(_NEAR, _KNOTS, self._table)
        areas = 0.5 * (self._table[1:] + self._table[:-1]) * np.diff(_KNOTS)
        self._survival: list[float] = self._table.tolist()
        self._sums = np.append(0.0, np.cumsum(areas))
        self._integral: list[float] = np.append(np.cumsum(areas[::-1])[::-1], 0.0).tolist()
