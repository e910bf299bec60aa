"""Axes and paths as SVG text. Colours are CSS classes, so that a page decides them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from zerolayer.core.fleet_state import Floats


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low`..`high` to `start`..`stop` in pixels, straight or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, values: Floats | float) -> Floats:
        """Pixels; values outside are drawn at the edge."""
        inside = np.clip(
            np.asarray(values, dtype=np.float64), min(self.low, self.high), max(self.low, self.high)
        )
        low, high = self.low, self.high
        if self.log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        pixels: Floats = self.start + (inside - low) / (high - low) * (self.stop - self.start)
        return pixels

    def ticks(self) -> list[float]:
        """Round values: decades on a logarithmic axis, else some six steps of 1, 2 or 5."""
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), 99)
            return [10.0**d for d in decades if 10.0**d <= self.high * (1 + 1e-9)]
        rough = (self.high - self.low) / 8
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * m for m in (1, 2, 5, 10) if base * m >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, int(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot area with an axis below it and one at its left."""

    x: Scale
    y: Scale
    width: float
    height: float

    def svg(self, body: Iterable[str], label: str) -> str:
        """The whole picture; `label` is what a screen reader says of it."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(label)}">{"".join(body)}</svg>'
        )

    def axes(
        self, x_labels: Sequence[tuple[float, str]], y_labels: Sequence[tuple[float, str]]
    ) -> str:
        """Grid lines and what stands at them."""
        left, right, bottom = self.x.start, self.x.stop, self.y.start
        parts = []
        for value, text in y_labels:
            at = number(self.y(value))
            parts.append(f'<path class="grid" d="M{number(left)} {at}H{number(right)}"/>')
            parts.append(
                f'<text class="tick end" x="{number(left - 5)}" y="{at}">{escape(text)}</text>'
            )
        for value, text in x_labels:
            at = number(self.x(value))
            parts.append(f'<path class="grid" d="M{at} {number(bottom)}V{number(self.y.stop)}"/>')
            parts.append(
                f'<text class="tick mid" x="{at}" y="{number(bottom + 13)}">{escape(text)}</text>'
            )
        return "".join(parts)

    def line(self, xs: Floats, ys: Floats, classes: str, title: str, name: str) -> str:
        """A curve through the points that are numbers; `name` is what a legend finds it by."""
        return (
            f'<path class="{classes}" data-policy="{escape(name)}" d="{self._points(xs, ys)}">'
            f"<title>{escape(title)}</title></path>"
        )

    def _points(self, xs: Floats, ys: Floats) -> str:
        px, py = self.x(xs), self.y(ys)
        parts, pen_down = [], False
        for x, y in zip(px.tolist(), py.tolist(), strict=True):
            if math.isnan(x) or math.isnan(y):
                pen_down = False
                continue
            parts.append(f"{'L' if pen_down else 'M'}{number(x)} {number(y)}")
            pen_down = True
        return "".join(parts)


def number(value: Floats | float) -> str:
    """Pixels with one decimal, without a needless zero."""
    return f"{float(value):.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """Seconds as a person says them: `80 ms`, `4.2 s`, `3 min`; `never` when infinite."""
    if math.isinf(seconds):
        return "never"
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100.0:
        return f"{seconds:.3g} s"
    return f"{seconds:.0f} s" if seconds < 1000.0 else f"{seconds:,.0f} s"


def clock(seconds: float) -> str:
    """A time on an axis: seconds, minutes or hours, whatever divides it."""
    if seconds == 0.0:
        return "0"
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= unit and abs(seconds / unit - round(seconds / unit, 1)) < 1e-6:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"
