"""The longest of an engine's latest steps, asked for any number of them."""

from bisect import bisect_right


class LongestSince:
    """Durations of numbered steps; answers the maximum over all after step s in O(log steps).

    Only suffix maxima are kept: a step that a later one is at least as long as is never an answer.
    """

    __slots__ = ("_seconds", "_steps")

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def note(self, step: int, seconds: float) -> None:
        """Step `step`, the latest, or the longest of several up to it, took so long."""
        kept = self._seconds
        while kept and kept[-1] <= seconds:
            kept.pop()
            self._steps.pop()
        self._steps.append(step)
        kept.append(seconds)

    def longest(self, after_step: int) -> float:
        """Seconds of the longest step after this one; 0 when there was none."""
        place = bisect_right(self._steps, after_step)
        return self._seconds[place] if place < len(self._seconds) else 0.0

    def clear(self) -> None:
        """Nobody will ask for earlier steps any more."""
        self._steps.clear()
        self._seconds.clear()
