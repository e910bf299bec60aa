"""What arrives in the next seconds, from what arrived in the last minute.

Eight simple forecasters look at the last HISTORY_S seconds: the last second again, means over 3 to
60 s, exponential means, and one that stops when the last second was empty (traffic that comes in
bursts). None is best everywhere, so each is weighed by what it has been worth lately, per horizon
and per quantity: weight ~ exp(-SHARPNESS * (loss / least loss - 1)) with the loss a decaying sum of
absolute errors (exponentially weighted forecasters; Cesa-Bianchi and Lugosi, *Prediction, Learning,
and Games*, 2006, section 2.2). `zerolayer bench forecast` measures what that is worth.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Floats

HISTORY_S = 60
"""Seconds of arrivals that a forecast looks back on."""
PARTS_PER_S = 4
"""Arrivals are counted in quarters of a second, so that the last whole second ended at most that
long ago."""
MEANS_S = (1, 3, 10, 30, 60)
EXPONENTIAL_S = (2.0, 6.0)
WHILE_IT_LASTS_S = 2.0
"""Memory of the exponential mean that forecasts nothing after an empty second."""
LOSS_MEMORY_S = 900.0
"""Seconds after which an error weighs 1/e of a new one."""
SHARPNESS = 40.0
"""A forecaster whose loss is 5 % above the least has exp(-2) of the best one's weight. This and
LOSS_MEMORY_S are the best of 4 x 3 on the first halves of the eight public traces; among them it
matters little (mean skill 0.186 to 0.207)."""
RECENT_PROMPTS_KEPT = 512
"""Prompt lengths kept as a sample of what comes next. The oldest is forgotten first."""

KINDS = 2  # requests, prompt tokens
_PART_NS = 1_000_000_000 // PARTS_PER_S
_PARTS = HISTORY_S * PARTS_PER_S
_AGES = np.arange(HISTORY_S, dtype=np.float64)[::-1]  # of the seconds of a history, oldest first


def _weights() -> Floats:
    """One row per forecaster: what it makes of each second of a history, oldest first."""
    means = [np.less(_AGES, seconds).astype(np.float64) for seconds in MEANS_S]
    fading = [np.exp(-_AGES / seconds) for seconds in (*EXPONENTIAL_S, WHILE_IT_LASTS_S)]
    return np.array(means + fading)


_WEIGHTS = _weights()
FORECASTERS = len(_WEIGHTS)


@dataclass(slots=True)
class _Made:
    """When a forecast was made, and which of its seconds is compared next."""

    closed: int
    ahead: int = 0


class Inflow:
    """Requests and prompt tokens that arrived lately, and what they say of the next seconds."""

    def __init__(self) -> None:
        self._parts = np.zeros((_PARTS, KINDS))  # a ring of quarter seconds
        self._closed = 0  # quarters counted since the start
        self._requests = self._tokens = 0.0
        self._part: int | None = None  # number of the quarter that is being counted
        self._pending: deque[tuple[_Made, Floats]] = deque(maxlen=HORIZON_S)
        self._noted = 0  # value of _closed when the newest of them was made
        self._losses = np.full((HORIZON_S, FORECASTERS, KINDS), 1e-9)
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
        whole = min(self._closed, _PARTS) // PARTS_PER_S
        at = np.arange(self._closed - whole * PARTS_PER_S, self._closed) % _PARTS
        sums: Floats = self._parts[at].reshape(whole, PARTS_PER_S, KINDS).sum(axis=1)
        return sums

    def forecast(self, now_ns: int) -> Floats:
        """Expected inflow in each of the next seconds, never negative.

        Shape (HORIZON_S, 2): requests and prompt tokens. Learns from what came since the last call.
        """
        history = self.per_second(now_ns)
        if len(history) == 0:
            return np.zeros((HORIZON_S, KINDS))
        figures = _figures(history)
        self._score(figures)
        losses = self._losses / self._losses.min(axis=1, keepdims=True)
        weights = np.exp(-SHARPNESS * (losses - 1.0))
        weights /= weights.sum(axis=1, keepdims=True)
        expected: Floats = (weights * figures).sum(axis=1)
        return expected

    def _score(self, figures: Floats) -> None:
        """Compare what was said of each second with what it brought; once a second, note
        `figures`."""
        while self._pending and self._closed - self._pending[0][0].closed > _PARTS:
            self._pending.popleft()  # what came then is forgotten
        for made, said in self._pending:
            while made.ahead < HORIZON_S and self._closed >= made.closed + PARTS_PER_S:
                at = np.arange(made.closed, made.closed + PARTS_PER_S) % _PARTS
                self._losses[made.ahead] *= _KEEP
                self._losses[made.ahead] += np.abs(said - self._parts[at].sum(axis=0))
                made.closed += PARTS_PER_S
                made.ahead += 1
        if not self._pending or self._closed - self._noted >= PARTS_PER_S:
            self._pending.append((_Made(self._closed), figures))
            self._noted = self._closed

    def _close_parts(self, now_ns: int) -> None:
        part = now_ns // _PART_NS
        if self._part is None:
            self._part = part
        if part <= self._part:
            return
        self._parts[self._closed % _PARTS] = (self._requests, self._tokens)
        self._requests = self._tokens = 0.0
        empty = part - self._part - 1
        at = np.arange(self._closed + 1, self._closed + 1 + min(empty, _PARTS)) % _PARTS
        self._parts[at] = 0.0
        self._closed += 1 + empty
        self._part = part


_KEEP = float(np.exp(-1.0 / LOSS_MEMORY_S))


def _figures(history: Floats) -> Floats:
    """What each forecaster says of one second to come, shape (FORECASTERS, KINDS)."""
    weights = _WEIGHTS[:, HISTORY_S - len(history) :]
    figures: Floats = weights @ history / weights.sum(axis=1, keepdims=True)
    figures[-1] *= history[-1, 0] > 0.0
    return figures
