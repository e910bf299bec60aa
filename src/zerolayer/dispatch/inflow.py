"""What arrives in the next seconds, from what arrived in the last minute."""

from collections import deque

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Floats

HISTORY_S = 60
"""Seconds of arrivals that a forecast looks back on."""
PARTS_PER_S = 4
"""Arrivals are counted in quarters of a second, so that `the last second` ends at most that long
ago."""
FAST_S = 3.0
"""Memory of the fast level, in seconds."""
RECENT_PROMPTS_KEPT = 512
"""Prompt lengths kept as a sample of what comes next. The oldest is forgotten first."""

_PART_NS = 1_000_000_000 // PARTS_PER_S
_PARTS = HISTORY_S * PARTS_PER_S


class InflowHistory:
    """Requests and prompt tokens per quarter second over the last HISTORY_S seconds."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, float]] = deque(maxlen=_PARTS)
        self._requests = 0.0
        self._tokens = 0.0
        self._part: int | None = None  # number of the quarter second being counted
        self.prompts: deque[int] = deque(maxlen=RECENT_PROMPTS_KEPT)
        """Prompt lengths in tokens, oldest first."""

    def arrived(self, now_ns: int, prompt_tokens: int) -> None:
        """A request came with this many prompt tokens."""
        self._close_parts(now_ns)
        self._requests += 1.0
        self._tokens += prompt_tokens
        self.prompts.append(prompt_tokens)

    def per_second(self, now_ns: int) -> Floats:
        """Sums over whole seconds that end at the last full quarter, oldest first.

        Shape (T, 2): requests and prompt tokens; T grows to HISTORY_S as history comes in.
        """
        self._close_parts(now_ns)
        parts = np.array(self._parts, dtype=np.float64).reshape(-1, 2)
        whole = len(parts) // PARTS_PER_S
        last = parts[len(parts) - whole * PARTS_PER_S :]
        sums: Floats = last.reshape(whole, PARTS_PER_S, 2).sum(axis=1)
        return sums

    def _close_parts(self, now_ns: int) -> None:
        part = now_ns // _PART_NS
        if self._part is None:
            self._part = part
        if part <= self._part:
            return
        self._parts.append((self._requests, self._tokens))
        self._requests = self._tokens = 0.0
        empty = min(part - self._part - 1, _PARTS)
        self._parts.extend([(0.0, 0.0)] * empty)
        self._part = part


def forecast(history: Floats) -> Floats:
    """Expected inflow in each of the next HORIZON_S seconds; never negative.

    `history`: one row per past second, oldest first, shape (T, K). Returns shape (HORIZON_S, K).
    """
    seconds, kinds = history.shape
    if seconds == 0:
        return np.zeros((HORIZON_S, kinds))
    weights = np.exp(-np.arange(seconds)[::-1] / FAST_S)
    fast = weights @ history / weights.sum()
    slow = history.mean(axis=0)
    return np.repeat((0.5 * fast + 0.5 * slow)[None], HORIZON_S, axis=0)
