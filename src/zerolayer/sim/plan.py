"""What `simulate` was asked for, checked before the first run, as cells of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerolayer.core.errors import ConfigError
from zerolayer.core.limits import ENGINES_MAX
from zerolayer.dispatch.policies.registry import POLICIES, Continuation, policy_entry
from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.faults import level_of
from zerolayer.sim.parallel import RunTask
from zerolayer.sim.profiles import EngineKind, profile_of
from zerolayer.sim.results import RunKey
from zerolayer.sim.statistics import Cell
from zerolayer.sim.traces import trace_names

OWN = "own"
"""Every system does with a lost stream what it does in reality."""
ALL = "all"
SEEDS_MAX = 1000
UTILISATION_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells to simulate: every trace, utilisation and fault level with every policy and seed."""

    traces: tuple[str, ...]
    policies: tuple[str, ...] = tuple(POLICIES)
    utilisations: tuple[float, ...] = (0.7,)
    faults: tuple[str, ...] = ("base",)
    seeds: int = 5
    first_seed: int = 0
    requests: int = 0
    """The first so many of each trace; 0 for all."""
    engines: int = 16
    kind: EngineKind = field(default_factory=EngineKind)
    continuation: str = OWN
    weights: Weights | None = None

    def check(self) -> None:
        """Raises ConfigError for what cannot be simulated. Traces are read when they are needed."""
        _within("--engines", self.engines, 1, ENGINES_MAX)
        _within("--seeds", self.seeds, 1, SEEDS_MAX)
        if self.requests < 0:
            raise ConfigError("--requests", self.requests, "give a number, or 0 for all")
        for share in self.utilisations:
            if not 0.0 < share <= UTILISATION_MAX:
                fix = f"give a share above 0 and up to {UTILISATION_MAX:g}, like 0.7"
                raise ConfigError("--utilisation", share, fix)
        for level in self.faults:
            level_of(level)
        for name in self.policies:
            policy_entry(name)
        choices = (OWN, *Continuation)
        if self.continuation not in choices:
            raise ConfigError("--continuation", self.continuation, f"one of {', '.join(choices)}")
        profile_of(self.kind)

    def cells(self) -> list[Cell]:
        """In the order in which they are simulated."""
        return [
            Cell(trace, utilisation, level, self.engines)
            for trace in self.traces
            for level in self.faults
            for utilisation in self.utilisations
        ]

    def tasks(self, cell: Cell) -> list[list[RunTask]]:
        """The runs of a cell: per policy, one per seed."""
        return [[self._task(cell, name, seed) for seed in self._seeds()] for name in self.policies]

    def _seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def _task(self, cell: Cell, policy: str, seed: int) -> RunTask:
        own = policy_entry(policy).continuation.value
        key = RunKey(
            trace=cell.trace,
            policy=policy,
            continuation=own if self.continuation == OWN else self.continuation,
            utilisation=cell.utilisation,
            faults=cell.faults,
            engines=cell.engines,
            seed=seed,
        )
        return RunTask(cell.trace, self.requests, key, self.kind, self.weights)


def chosen(option: str, text: str, everything: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between them, or `all`. Raises ConfigError for none and for repeats."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names == (ALL,):
        return tuple(everything)
    if not names or len(set(names)) < len(names):
        raise ConfigError(option, text, "give different names with commas between them, or all")
    return names


def chosen_traces(text: str) -> tuple[str, ...]:
    """Names or files of traces; `all` for those of the package."""
    return chosen("--trace", text, trace_names())


def _within(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(option, value, f"give {least} to {most}")
