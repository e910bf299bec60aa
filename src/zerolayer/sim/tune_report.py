"""A search for weights as evidence: JSON for programs, Markdown for people."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.plan import Plan
from zerolayer.sim.scoring import Baseline
from zerolayer.sim.tune import (
    SOURCE_OBJECTIVE,
    TERMS,
    Candidate,
    Fold,
    Scores,
    Search,
    cross_validate,
    mean,
    tunable,
)

TRIED_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a tuning run found."""

    plan: Plan
    peers: tuple[str, ...]
    search: Search
    baseline: Baseline
    fresh: Mapping[str, Scores]
    """Scores of `default` and `winner` with seeds that the search did not see."""
    fresh_first_seed: int
    minutes: float

    @property
    def winner(self) -> Candidate:
        """The best that was tried."""
        return self.search.best()

    @property
    def objectives(self) -> list[Candidate]:
        """Candidates that differ in w1, w2, w3 alone, best first."""
        tried = [c for c in self.search.tried if c.stage == "objective" and c.complete]
        return sorted(tried, key=lambda candidate: candidate.score)


def percent_of(score: float) -> str:
    """A mean of `scoring.lag` as a person reads it: `-8.2 %` is that much below the best peer, and
    what lies above it counted twice."""
    return f"{math.expm1(score):+.1%}".replace("%", " %")


def evidence_json(evidence: Evidence) -> dict[str, Any]:
    """All of it, as plain values."""
    plan, search = evidence.plan, evidence.search
    return {
        "weights": asdict(evidence.winner.weights),
        "score": evidence.winner.score,
        "scores": dict(evidence.winner.scores),
        "stage": evidence.winner.stage,
        "default": {"weights": asdict(search.tried[0].weights), "score": search.tried[0].score,
                    "scores": dict(search.tried[0].scores)},
        "fresh_seeds": {"first": evidence.fresh_first_seed,
                        **{name: dict(scores) for name, scores in evidence.fresh.items()}},
        "cross_validation": [asdict(fold) for fold in cross_validate(search.tried)],
        "objective": "mean over cells and terms of log(ours / best peer), twice where above 0",
        "terms": [list(term) for term in TERMS],
        "peers": list(evidence.peers),
        "best_peers": [
            {**asdict(cell), "measure": measure, "share": share, "seconds": seconds,
             "peer": evidence.baseline.names[cell][measure, share]}
            for cell, tails in evidence.baseline.tails.items()
            for (measure, share), seconds in tails.items()
        ],
        "plan": {
            "traces": list(plan.traces), "utilisations": list(plan.utilisations),
            "faults": list(plan.faults), "seeds": plan.seeds, "requests": plan.requests,
            "engines": plan.engines, "kind": asdict(plan.kind), "continuation": plan.continuation,
        },
        "cut_short": search.cut_short,
        "minutes": round(evidence.minutes, 1),
        "tried": [
            {"stage": c.stage, "score": c.score if c.complete else None, "scores": dict(c.scores),
             "weights": asdict(c.weights)}
            for c in search.tried
        ],
    }  # fmt: skip


def evidence_markdown(evidence: Evidence) -> str:
    """The same in short."""
    plan, search, winner = evidence.plan, evidence.search, evidence.winner
    default = search.tried[0]
    ended = "the time was up" if search.cut_short else "nothing helped any more"
    given_up = sum(not candidate.complete for candidate in search.tried)
    parts = [
        "# Weights of the policy `zerolayer`\n",
        f"{len(search.tried)} candidates ({given_up} given up early) on "
        f"{', '.join(plan.traces)}; utilisation "
        f"{_list(plan.utilisations)}, faults {_list(plan.faults)}, {plan.seeds} seeds, "
        f"{plan.requests or 'all'} requests, {plan.engines} engines ({plan.kind.gpu}, "
        f"{plan.kind.model}), {evidence.minutes:.0f} minutes, until {ended}.\n",
        "Scores are means over cells of P99.9 and P99 of the whole answer and of the worst pause, "
        f"against the best of {_list(evidence.peers)} in each cell; what is above that peer counts "
        "twice, and below zero is better than it.\n",
        _scores_table(evidence, default, winner),
        "\n## Weights\n",
        _weights_table(default.weights, winner.weights),
        "\n## Left out one at a time\n",
        _folds_table(cross_validate(search.tried)),
        "\n## w1, w2, w3 of the entropy\n",
        _objective_table(evidence.objectives),
    ]
    return "\n".join(parts)


def _list(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _scores_table(evidence: Evidence, default: Candidate, winner: Candidate) -> str:
    fresh = evidence.fresh
    rows = [
        [
            trace, percent_of(default.scores[trace]), percent_of(winner.scores[trace]),
            percent_of(fresh["default"][trace]), percent_of(fresh["winner"][trace]),
        ]
        for trace in default.scores
    ]  # fmt: skip
    means = [default.score, winner.score, *(mean(fresh[n].values()) for n in ("default", "winner"))]
    rows.append(["mean", *(percent_of(score) for score in means)])
    head = ("trace", "default", "winner", "default, fresh seeds", "winner, fresh seeds")
    return _table(head, rows)


def _weights_table(default: Weights, winner: Weights) -> str:
    rows = [
        [name, f"{getattr(default, name):g}", f"{getattr(winner, name):g}"]
        for name in tunable(default)
    ]
    for name in ("util", "mem", "link"):
        before, after = getattr(default.objective, name), getattr(winner.objective, name)
        rows.append([f"objective.{name}", f"{before:g}", f"{after:g}"])
    return _table(("weight", "default", "winner"), rows)


def _folds_table(folds: Sequence[Fold]) -> str:
    if not folds:
        return "One trace: nothing to leave out.\n"
    rows = [[fold.trace, percent_of(fold.default), percent_of(fold.score)] for fold in folds]
    means = [mean(fold.default for fold in folds), mean(fold.score for fold in folds)]
    rows.append(["mean", *(percent_of(score) for score in means)])
    return _table(("left out", "default on it", "best on the others, on it"), rows)


def _objective_table(objectives: Sequence[Candidate]) -> str:
    if not objectives:
        return "Not reached.\n"
    source = [c for c in objectives if c.weights.objective == SOURCE_OBJECTIVE]
    shown = [*objectives[:TRIED_SHOWN], *(c for c in source if c not in objectives[:TRIED_SHOWN])]
    rows = []
    for candidate in shown:
        w = candidate.weights.objective
        mark = " (the source's)" if w == SOURCE_OBJECTIVE else ""
        rows.append([f"({w.util:g}, {w.mem:g}, {w.link:g}){mark}", percent_of(candidate.score)])
    return _table(("w1, w2, w3", "score"), rows)
