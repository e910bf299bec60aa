"""How long a step of an engine takes, learned while it runs.

Model: seconds = b0 + b1*prefill + b2*decodes + b3*context + b4*prefill^2, every b at least zero. It
is fitted by recursive least squares, written as a Kalman filter over drifting coefficients (Ljung,
*System Identification*, 2nd ed., section 11.2): the prior has a strength, old steps are forgotten
only where new ones tell more (plain exponential forgetting winds up when no prefill comes for
minutes), and a step that differs wildly is clipped by its own uncertainty. An engine that turns 20
times slower must look slow for many steps, not teach the model that slow is normal.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerolayer.core.limits import COST_ERRORS_KEPT, STEP_SECONDS_MAX

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

LONG_PREFILL_TOKENS = 64
"""A step with fewer prompt tokens says little of what a prefill costs."""
TAUGHT_PREFILLS = 3
"""Prefills after which a model may teach the others."""

_TOKENS = 1e-3  # features are thousands of tokens and tens of requests: numbers near 1
_REQUESTS = 0.1
_DIAGONAL = np.arange(5)
_PREFILL_TERMS = np.array((1, 4))


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    prefill_tokens: int
    decode_requests: int
    context_tokens: int


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


class StepCostModel:
    """Predicts and learns the step time of one engine."""

    def __init__(self, prior: CostPrior | None = None) -> None:
        prior = prior or CostPrior()
        self._b = np.array(prior.mean())
        self._coefficients: tuple[float, ...] = prior.mean()
        self._deviations = np.array(prior.deviations())
        self._p = np.diag(np.square(self._deviations))
        self._errors: deque[float] = deque(maxlen=COST_ERRORS_KEPT)
        self._steps = 0
        self._prefills = 0

    @property
    def steps(self) -> int:
        """Steps learned from."""
        return self._steps

    @property
    def prefills(self) -> int:
        """Those of them with a long prefill."""
        return self._prefills

    def start_like(self, teacher: "StepCostModel") -> None:
        """Expect what another engine's model expects, with the uncertainty of one's own; of the
        decode steps only while this model has seen hardly any itself."""
        unknown = _PREFILL_TERMS if self._steps > UNCLIPPED_STEPS else _DIAGONAL
        self._b[unknown] = teacher._b[unknown]
        self._coefficients = tuple(self._b.tolist())

    def expected_s(self, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """Expected seconds of a step, within STEP_SECONDS_MIN..STEP_SECONDS_MAX."""
        b = self._coefficients
        prefill = prefill_tokens * _TOKENS
        seconds = (
            b[0]
            + prefill * (b[1] + b[4] * prefill)
            + b[2] * decode_requests * _REQUESTS
            + b[3] * context_tokens * _TOKENS
        )
        return min(STEP_SECONDS_MAX, max(STEP_SECONDS_MIN, seconds))

    @property
    def prefill_s_per_token(self) -> float:
        """What one more prompt token adds, in seconds."""
        return self._coefficients[1] * _TOKENS

    @property
    def decode_s_per_request(self) -> float:
        """What one more decoding stream adds, in seconds."""
        return self._coefficients[2] * _REQUESTS

    @property
    def context_s_per_token(self) -> float:
        """What one more token of context adds, in seconds."""
        return self._coefficients[3] * _TOKENS

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """b0 to b4 in seconds: of a step, per prompt token, per decoding stream, per token of
        context, per prompt token squared."""
        step_s, _, _, _, squared = self._coefficients
        return (
            step_s, self.prefill_s_per_token, self.decode_s_per_request,
            self.context_s_per_token, squared * _TOKENS * _TOKENS,
        )  # fmt: skip

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a finished step. Seconds outside 0..STEP_SECONDS_MAX are cut to it; NaN is
        ignored."""
        if not seconds >= 0.0:
            return
        seconds = min(seconds, STEP_SECONDS_MAX)
        expected = self.expected_s(work.prefill_tokens, work.decode_requests, work.context_tokens)
        self._errors.append(abs(seconds - expected) / expected)
        self._steps += 1
        self._prefills += work.prefill_tokens >= LONG_PREFILL_TOKENS
        self._update(self._features(work), seconds, expected)

    def error_percentiles(self) -> ErrorPercentiles:
        """How far predictions were off lately; zeros before the first step."""
        if not self._errors:
            return ErrorPercentiles(0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.quantile(np.array(self._errors), (0.5, 0.9, 0.99))
        return ErrorPercentiles(len(self._errors), float(p50), float(p90), float(p99))

    @staticmethod
    def _features(work: StepWork) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        prefill = work.prefill_tokens * _TOKENS
        return np.array(
            (1.0, prefill, work.decode_requests * _REQUESTS, work.context_tokens * _TOKENS,
             prefill * prefill)
        )  # fmt: skip

    def _update(
        self,
        x: np.ndarray[tuple[int], np.dtype[np.float64]],
        seconds: float,
        expected: float,
    ) -> None:
        px = self._p @ x
        noise = NOISE_SHARE * expected + NOISE_FLOOR_S
        variance = float(x @ px) + noise * noise
        surprise = seconds - float(self._b @ x)
        if self._steps > UNCLIPPED_STEPS:
            surprise = min(surprise, CLIP_SIGMAS * variance**0.5)
        gain = px / variance
        self._b = self._b + gain * surprise
        self._p = self._p - np.outer(gain, px)
        self._keep_positive()
        self._drift()
        self._coefficients = tuple(self._b.tolist())

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


def teach_newcomers(models: Sequence[StepCostModel]) -> None:
    """Let models of equal engines that never saw a prefill start like the one that saw most.

    Without it an engine that had no work yet is expected to be as slow as the prior says, and where
    the prior is far too slow it never gets any.
    """
    teacher = max(models, key=lambda model: model.prefills, default=None)
    if teacher is None or teacher.prefills < TAUGHT_PREFILLS:
        return
    for model in models:
        if model.prefills == 0:
            model.start_like(teacher)
