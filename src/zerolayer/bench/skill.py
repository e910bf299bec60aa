"""How much better a forecast is than saying nothing new: errors and skill. Pure.

skill = 1 - error / error of a baseline, per horizon: 0 is no better, 1 is perfect. Baselines are
"no change" (the last second again) and moving averages of the last seconds.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Floats

AVERAGES_S = (5, 10, 30, 60)
"""Windows of the moving averages, in seconds."""
AVERAGE_S = 10
"""The one that is named in tables; the best of all is named beside it."""
WANTED = 0.2
"""Skill that is promised at every horizon."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was forecast, and on which traffic."""

    trace: str
    rate: str
    """`recorded`, or `fleet` for arrivals squeezed to load a whole fleet."""
    quantity: str
    requests_per_s: float
    burstiness: float
    """Variance / mean of the requests per second; 1 where arrivals are independent."""


@dataclass(frozen=True, slots=True)
class Skill:
    """Skill at 1 to HORIZON_S seconds, over `seconds` seconds that no constant was chosen on."""

    subject: Subject
    seconds: int
    error: tuple[float, ...]
    """Mean absolute error, in units of the quantity."""
    no_change: tuple[float, ...]
    average: tuple[float, ...]
    """Against the moving average over AVERAGE_S."""
    best_average: tuple[float, ...]
    """Against the moving average that is best on just these seconds, horizon by horizon."""
    no_change_rms: tuple[float, ...]
    """The first again, with root mean square errors."""
    best_average_rms: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether the skill against "no change" is above WANTED at every horizon."""
        return min(self.no_change) > WANTED

    def row(self) -> dict[str, Any]:
        """As JSON, rounded."""
        row = asdict(self)
        subject = row.pop("subject")
        return {name: _rounded(value) for name, value in (subject | row).items()}


def measured_skill(subject: Subject, actual: Floats, forecast: Floats) -> Skill:
    """Skill on the second half of the seconds.

    `actual`: shape (T, C), one row per second. `forecast`: shape (T, HORIZON_S, C), made at the end
    of each. NaN (an engine that is down) counts neither for nor against. Raises ValueError for
    fewer than 4 * HORIZON_S seconds.
    """
    seconds = len(actual)
    if seconds < 4 * HORIZON_S:
        raise ValueError(f"{seconds} seconds are too few to judge a forecast of {HORIZON_S}")
    averages = {window: _average(actual, window) for window in AVERAGES_S}
    columns = [
        _skill_at(ahead, actual, forecast[:, ahead - 1], averages)
        for ahead in range(1, HORIZON_S + 1)
    ]
    figures = [tuple(column[number] for column in columns) for number in range(6)]
    return Skill(subject, seconds - seconds // 2, *figures)


def _skill_at(
    ahead: int, actual: Floats, forecast: Floats, averages: dict[int, Floats]
) -> tuple[float, ...]:
    """The figures of `Skill`, from `error` on, at one horizon."""
    begin = len(actual) // 2
    came = actual[begin + ahead :]

    def errors(said: Floats) -> Floats:
        wrong = said[begin:-ahead] - came
        return np.array((np.nanmean(np.abs(wrong)), np.sqrt(np.nanmean(np.square(wrong)))))

    ours, same = errors(forecast), errors(actual)
    of_averages = {window: errors(average) for window, average in averages.items()}
    best = np.min(list(of_averages.values()), axis=0)
    return (
        float(ours[0]),
        _gain(ours[0], same[0]),
        _gain(ours[0], of_averages[AVERAGE_S][0]),
        _gain(ours[0], best[0]),
        _gain(ours[1], same[1]),
        _gain(ours[1], best[1]),
    )


def _gain(ours: float, baseline: float) -> float:
    return float(1.0 - ours / baseline) if baseline > 0.0 else 0.0


def _average(actual: Floats, window: int) -> Floats:
    """Mean of the last `window` rows, of fewer at the start; NaN where one of them is."""
    sums = np.cumsum(np.vstack((np.zeros((1, actual.shape[1])), np.nan_to_num(actual))), axis=0)
    ends = np.arange(1, len(actual) + 1)
    begins = np.maximum(0, ends - window)
    means: Floats = (sums[ends] - sums[begins]) / (ends - begins)[:, None]
    return np.where(np.isnan(actual), np.nan, means)


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
