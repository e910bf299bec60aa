"""What the trials of `bench failover` add up to. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zerolayer.bench.compare import Comparison, percentile, summary

CAUSES = ("kill", "freeze")
REASONS_MAX = 10
"""Sentences of one kind that a report shows."""
MODES = ("snapshot", "prefill")


@dataclass(frozen=True)
class Trial:
    """One stream of one round, against its single-stream reference."""

    cause: str
    """`kill`, `freeze`, or `none` for an undisturbed round."""
    mode: str
    """`snapshot` or `prefill`: how it had to go on."""
    context_tokens: int
    """Tokens of its prompt."""
    broken: bool
    fault: str
    comparison: Comparison
    counted_tokens: int | None
    """Tokens that the server says it sent (`usage`)."""
    received_tokens: int
    gap_ms: float | None
    """The silence into which the fault fell, as the client saw it; None: for ever."""
    other_gap_ms: float
    """Its longest other silence from the fault on (an engine starts beside it)."""
    moved: bool
    """It was on the engine that was hurt."""
    cut_after: int = 0
    """Tokens that had come when the fault struck."""
    after_declared_ms: tuple[float, ...] = ()
    """From the moment that the fleet declared the fault until the stream's next token."""
    restored_tokens: int = 0
    declared_ms: tuple[float, ...] = ()
    """From the fault until the fleet declared it."""
    unasked_moves: tuple[str, ...] = ()
    """Moves away from an engine that nobody hurt, and what the fleet gave as their reason."""

    @property
    def lost(self) -> int:
        """Tokens missing: behind a difference, or of what the server counted."""
        short = (self.counted_tokens or self.received_tokens) - self.received_tokens
        return max(self.comparison.lost, short, 0)

    @property
    def repeated(self) -> int:
        """Tokens too many, in the same way."""
        more = self.received_tokens - (self.counted_tokens or self.received_tokens)
        return max(self.comparison.repeated, more, 0)

    @property
    def differs_before_the_cut(self) -> bool:
        """The difference was there before the fault, so the fault did not make it."""
        at = self.comparison.first_difference
        return at is not None and at < self.cut_after


def totals(trials: Sequence[Trial]) -> dict[str, Any]:
    """The figures of a set of trials."""
    moved = [trial for trial in trials if trial.moved]
    declared = [ms for trial in moved for ms in trial.after_declared_ms]
    return {
        "streams": len(trials),
        "moved": len(moved),
        "broken": sum(trial.broken for trial in trials),
        "tokens_lost": sum(trial.lost for trial in trials),
        "tokens_repeated": sum(trial.repeated for trial in trials),
        "exact_share": share(trials, lambda trial: trial.comparison.exact),
        "gap_ms": summary([t.gap_ms for t in moved if t.gap_ms is not None]),
        "other_gap_ms": summary([trial.other_gap_ms for trial in moved]),
        "declared_ms": summary([ms for trial in moved for ms in trial.declared_ms]),
        "after_declared_ms": summary(declared),
    }


def share(trials: Sequence[Trial], test: Callable[[Trial], bool]) -> float | None:
    """The share of trials for which `test` holds; None of none."""
    return round(sum(map(test, trials)) / len(trials), 4) if trials else None


def report(trials: Sequence[Trial], contexts: Sequence[int]) -> dict[str, Any]:
    """Everything: over all trials, and by mode, cause and context length.

    `exact_share`, `gap_ms` and `after_declared_ms` at the top are those of the snapshot mode, which
    is what users get; broken, lost and repeated count every stream of every mode.
    """
    hurt = [trial for trial in trials if trial.cause in CAUSES]
    top = totals([trial for trial in hurt if trial.mode == "snapshot"])
    everything = totals(hurt)
    for key in ("streams", "moved", "broken", "tokens_lost", "tokens_repeated"):
        top[key] = everything[key]
    return {
        **top,
        "context_tokens": list(contexts),
        "by_mode": {mode: _mode_report(hurt, mode, contexts) for mode in MODES},
        "unasked_moves": [what for trial in trials for what in trial.unasked_moves][:REASONS_MAX],
        "faults": [trial.fault for trial in hurt if trial.broken][:REASONS_MAX],
    }


def _mode_report(trials: Sequence[Trial], mode: str, contexts: Sequence[int]) -> dict[str, Any]:
    ours = [trial for trial in trials if trial.mode == mode]
    by_context = {
        context: totals([t for t in ours if t.context_tokens == context]) for context in contexts
    }
    return {
        **totals(ours),
        "by_cause": {cause: totals([t for t in ours if t.cause == cause]) for cause in CAUSES},
        "by_context": {str(context): figures for context, figures in by_context.items()},
        "gap_longest_to_shortest_context": _gap_ratio(ours, contexts),
        "restored_from_snapshot": sum(1 for t in ours if t.moved and t.restored_tokens > 0),
    }


def _gap_ratio(trials: Sequence[Trial], contexts: Sequence[int]) -> float | None:
    """Median gap after a kill at the longest context over that at the shortest."""

    def median(context: int) -> float | None:
        ours = [t for t in trials if t.context_tokens == context and t.moved and t.cause == "kill"]
        gaps = [t.gap_ms for t in ours if t.gap_ms is not None]
        return percentile(gaps, 0.5)

    short, long = median(min(contexts)), median(max(contexts))
    return round(long / short, 2) if short and long else None


def differences(trials: Sequence[Trial]) -> dict[str, Any]:
    """How often a stream differs from its single-stream reference, and why it may.

    vLLM's sums depend on what else is in the batch, so concurrent runs differ from single ones
    without any fault; the undisturbed rounds of the same run say how often.
    """

    def row(some: Iterable[Trial]) -> dict[str, Any]:
        chosen = list(some)
        differing = [trial for trial in chosen if not trial.comparison.exact]
        return {
            "streams": len(chosen),
            "differing": len(differing),
            "differing_share": share(chosen, lambda trial: not trial.comparison.exact),
            "differing_before_the_fault": sum(t.differs_before_the_cut for t in differing),
        }

    hurt = [trial for trial in trials if trial.cause in CAUSES]
    return {
        "undisturbed": row(trial for trial in trials if trial.cause == "none"),
        "moved_by_snapshot": row(t for t in hurt if t.moved and t.mode == "snapshot"),
        "moved_by_prefill": row(t for t in hurt if t.moved and t.mode == "prefill"),
        "not_moved": row(trial for trial in hurt if not trial.moved),
    }
