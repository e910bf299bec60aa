"""How long a step of an engine takes, learned while it runs.

Model: seconds = b0 + b1*prefill + b2*decodes + b3*context + b4*prefill^2, every b at least zero. It
is fitted by recursive least squares, written as a Kalman filter over drifting coefficients (Ljung,
*System Identification*, 2nd ed., section 11.2): the prior has a strength, old steps are forgotten
only where new ones tell more (plain exponential forgetting winds up when no prefill comes for
minutes), and a step that differs wildly is clipped by its own uncertainty. An engine that turns 20
times slower must look slow for many steps, not teach the model that slow is normal.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zerolayer.core.fleet_state import Floats
from zerolayer.core.limits import COST_ERRORS_KEPT, STEP_SECONDS_MAX

Coefficients = Floats
"""b0 to b4 in the model's own units: shape (5,)."""

STEP_SECONDS_MIN = 1e-4
"""No engine step is shorter; keeps ratios of actual to expected finite."""
UNCLIPPED_STEPS = 8
"""First steps of a model are believed as they come: the prior knows nothing of this machine."""
CLIP_SIGMAS = 3.0
"""A later step counts as at most this many standard deviations slower than predicted."""
DRIFT_SHARE = 0.02
"""Each coefficient may drift by this share of itself per step: a memory of some tens of steps, so
that a GPU is learned in as many and a busy box is followed in a hundred."""
DRIFT_FLOOR_SHARE = 0.002
"""The same as a share of the prior's deviation, for a coefficient that is near zero."""
NOISE_SHARE = 0.15
"""Standard deviation of a step around its mean, as a share of it; seen on two shared CPU cores."""
NOISE_FLOOR_S = 2e-4

MISFIT_STEPS = 64
"""Steps over which it is averaged how much larger errors are than the model expects them."""

_TOKENS = 1e-3  # features are thousands of tokens and tens of requests: numbers near 1
_REQUESTS = 0.1
_UNITS = np.array((1.0, _TOKENS, _REQUESTS, _TOKENS, _TOKENS * _TOKENS))
_DIAGONAL = np.arange(5)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    prefill_tokens: int
    decode_requests: int
    context_tokens: int


class StepTimes(NamedTuple):
    """What a step costs, in seconds: b0 to b4 of the model."""

    step_s: float
    prefill_s: float
    """What one more prompt token adds."""
    decode_s: float
    """What one more decoding stream adds."""
    context_s: float
    """What one more token of context adds."""
    prefill_squared_s: float
    """What the square of the prompt tokens adds, per token squared."""

    @staticmethod
    def of(b: Coefficients) -> "StepTimes":
        """From coefficients in the model's own units."""
        return StepTimes(*(b * _UNITS).tolist())

    def expected_s(self, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """Expected seconds of a step, within STEP_SECONDS_MIN..STEP_SECONDS_MAX."""
        seconds = (
            self.step_s
            + prefill_tokens * (self.prefill_s + self.prefill_squared_s * prefill_tokens)
            + self.decode_s * decode_requests
            + self.context_s * context_tokens
        )
        return min(STEP_SECONDS_MAX, max(STEP_SECONDS_MIN, seconds))


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Where learning starts, in seconds, with a standard deviation each. The default is a 135M
    model on two CPU cores; a standard deviation as large as its mean leaves room for a GPU."""

    step_s: float = 0.050
    step_sd: float = 0.050
    prefill_s_per_ktoken: float = 1.5
    prefill_sd: float = 1.5
    decode_s_per_ten: float = 0.005
    decode_sd: float = 0.005
    context_s_per_ktoken: float = 0.001
    context_sd: float = 0.002
    prefill_s_per_ktoken_squared: float = 0.0
    prefill_squared_sd: float = 0.1

    def mean(self) -> tuple[float, float, float, float, float]:
        """Coefficients b0 to b4 in the model's own units."""
        return (
            self.step_s, self.prefill_s_per_ktoken, self.decode_s_per_ten,
            self.context_s_per_ktoken, self.prefill_s_per_ktoken_squared,
        )  # fmt: skip

    def deviations(self) -> tuple[float, float, float, float, float]:
        """Standard deviations of b0 to b4."""
        return (
            self.step_sd, self.prefill_sd, self.decode_sd,
            self.context_sd, self.prefill_squared_sd,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ErrorPercentiles:
    """|actual - predicted| / predicted of the last steps, each predicted before it was learned."""

    steps: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Belief:
    """b0 to b4 of a model, in its own units."""

    mean: Coefficients
    covariance: Floats
    """Shape (5, 5): the filter's, times how much larger its errors were lately than it expected
    where they were (normalised innovation squared)."""
    prior_deviations: Coefficients


class StepCostModel:
    """Predicts and learns the step time of one engine."""

    def __init__(self, prior: CostPrior | None = None) -> None:
        prior = prior or CostPrior()
        self._b = np.array(prior.mean())
        self.times = StepTimes.of(self._b)
        """What was learned so far."""
        self._deviations = np.array(prior.deviations())
        self._p = np.diag(np.square(self._deviations))
        self._errors: deque[float] = deque(maxlen=COST_ERRORS_KEPT)
        self._steps = 0
        self._misfit = 1.0

    @property
    def steps(self) -> int:
        """Steps learned from."""
        return self._steps

    @property
    def belief(self) -> "Belief":
        """What it has learned, and how surely."""
        return Belief(self._b, self._p * max(1.0, self._misfit), self._deviations)

    def expected_s(self, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """See `StepTimes.expected_s`."""
        return self.times.expected_s(prefill_tokens, decode_requests, context_tokens)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a finished step. Seconds outside 0..STEP_SECONDS_MAX are cut to it; NaN is
        ignored."""
        if not seconds >= 0.0:
            return
        seconds = min(seconds, STEP_SECONDS_MAX)
        expected = self.expected_s(work.prefill_tokens, work.decode_requests, work.context_tokens)
        self._errors.append(abs(seconds - expected) / expected)
        self._steps += 1
        self._update(self._features(work), seconds, expected)

    def error_percentiles(self) -> ErrorPercentiles:
        """How far predictions were off lately; zeros before the first step."""
        if not self._errors:
            return ErrorPercentiles(0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.quantile(np.array(self._errors), (0.5, 0.9, 0.99))
        return ErrorPercentiles(len(self._errors), float(p50), float(p90), float(p99))

    @staticmethod
    def _features(work: StepWork) -> Floats:
        prefill = work.prefill_tokens * _TOKENS
        return np.array(
            (1.0, prefill, work.decode_requests * _REQUESTS, work.context_tokens * _TOKENS,
             prefill * prefill)
        )  # fmt: skip

    def _update(
        self,
        x: Floats,
        seconds: float,
        expected: float,
    ) -> None:
        px = self._p @ x
        noise = NOISE_SHARE * expected + NOISE_FLOOR_S
        variance = float(x @ px) + noise * noise
        surprise = seconds - float(self._b @ x)
        if self._steps > UNCLIPPED_STEPS:
            surprise = min(surprise, CLIP_SIGMAS * variance**0.5)
            self._misfit += (surprise * surprise / variance - self._misfit) / MISFIT_STEPS
        gain = px / variance
        self._b = self._b + gain * surprise
        self._p = self._p - np.outer(gain, px)
        self._keep_positive()
        self._drift()
        self.times = StepTimes.of(self._b)

    def _keep_positive(self) -> None:
        """More work never costs less. A coefficient below zero is conditioned to be zero: the
        others take over what it stood for, so that the prediction of this step stays."""
        for i in np.flatnonzero(self._b < 0.0):
            if self._b[i] < 0.0 and self._p[i, i] > 0.0:
                self._b = self._b - self._p[:, i] * (self._b[i] / self._p[i, i])
        self._b = np.maximum(self._b, 0.0)

    def _drift(self) -> None:
        """Uncertainty grows with time, up to the prior's: a prefill may not come for minutes."""
        step = np.maximum(DRIFT_SHARE * self._b, DRIFT_FLOOR_SHARE * self._deviations)
        self._p = (self._p + self._p.T) * 0.5
        self._p[_DIAGONAL, _DIAGONAL] += step * step
        shrink = np.minimum(1.0, self._deviations / np.sqrt(self._p.diagonal()))
        self._p *= np.outer(shrink, shrink)
