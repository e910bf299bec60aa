"""What the stall detector remembers: an engine's usual lateness, moves made, and who flapped."""

from collections import deque

from zerolayer.core.limits import STEP_HISTORY_KEPT

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS


class StepHistory:
    """Actual / expected of an engine's finished steps of one kind."""

    WARM_STEPS = 8
    """Fewer steps than this say nothing."""
    USUAL_QUANTILE = 0.9
    USUAL_MAX = 3.0
    """However late an engine usually is, no more than this is taken as usual: else an engine that
    turned 20 times slower would soon be normal."""
    RECENT_STEPS = 8

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=STEP_HISTORY_KEPT)
        self._usual = 1.0

    @property
    def warm(self) -> bool:
        """Whether the history is long enough to judge by."""
        return len(self._ratios) >= self.WARM_STEPS

    @property
    def usual(self) -> float:
        """How late its late steps usually are, as a ratio within 1..USUAL_MAX."""
        return self._usual

    @property
    def recent(self) -> float:
        """Median ratio of the last few steps; 1.0 where there are none."""
        last = sorted(list(self._ratios)[-self.RECENT_STEPS :])
        return last[len(last) // 2] if last else 1.0

    def add(self, ratio: float) -> None:
        """Remember a finished step."""
        self._ratios.append(ratio)
        ordered = sorted(self._ratios)
        high = ordered[min(len(ordered) - 1, int(len(ordered) * self.USUAL_QUANTILE))]
        self._usual = min(self.USUAL_MAX, max(1.0, high))


class MoveBudget:
    """Streams moved in the last minute against a maximum."""

    def __init__(self) -> None:
        self._moves: deque[tuple[int, int]] = deque()
        self._used = 0

    def take(self, now_ns: int, streams: int, per_minute_max: int, *, force: bool = False) -> bool:
        """Spend `streams` moves. False: over the maximum, nothing spent (never so with `force`).

        The first engine of a minute may always be moved unless the maximum is 0: it is one fault,
        and an engine can hold more streams than the budget.
        """
        self._expire(now_ns)
        first = self._used == 0 and per_minute_max > 0
        if not (force or first or self._used + streams <= per_minute_max):
            return False
        if streams > 0:
            self._moves.append((now_ns, streams))
            self._used += streams
        return True

    def _expire(self, now_ns: int) -> None:
        while self._moves and now_ns - self._moves[0][0] >= MINUTE_NS:
            self._used -= self._moves.popleft()[1]


class Readmission:
    """When a stalled engine may return: after a hold that doubles each time it stalls again."""

    HOLD_NS = SECOND_NS
    HOLD_NS_MAX = MINUTE_NS
    FORGIVEN_AFTER_NS = 5 * MINUTE_NS
    """An engine that stalled once in this time starts with the first hold again."""

    def __init__(self) -> None:
        self._stalls = 0
        self._stalled_ns = 0
        self._seq_at_stall = 0
        self._proved_ns: int | None = None

    @property
    def hold_ns(self) -> int:
        """How long it stays out after its last stall."""
        doublings = min(max(0, self._stalls - 1), 16)
        return min(self.HOLD_NS_MAX, self.HOLD_NS << doublings)

    def stalled(self, now_ns: int, step_seq: int) -> None:
        """Its streams were moved at `now_ns`."""
        if self._stalls and now_ns - self._stalled_ns > self.FORGIVEN_AFTER_NS:
            self._stalls = 0
        self._stalls += 1
        self._stalled_ns = now_ns
        self._seq_at_stall = step_seq
        self._proved_ns = None

    def proved(self, now_ns: int) -> None:
        """A round trip through its queue that was begun after the stall came back at `now_ns`."""
        if now_ns > self._stalled_ns:
            self._proved_ns = now_ns

    def may_return(self, now_ns: int, step_seq: int) -> bool:
        """Both proofs are there and the hold is over."""
        held = now_ns - self._stalled_ns >= self.hold_ns
        return held and self._proved_ns is not None and step_seq != self._seq_at_stall
