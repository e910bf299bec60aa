"""One simulated run: from what is asked to what came out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.policies import Policy
from zerolayer.dispatch.policies.registry import policy_entry
from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.capacity import capacity
from zerolayer.sim.faults import Fault, FaultPlan, FleetShape, plan_faults
from zerolayer.sim.fleet import FleetSetup, SimFleet
from zerolayer.sim.offloading import Offloading
from zerolayer.sim.profiles import EngineKind, EngineProfile, FittedEngine, profile_of
from zerolayer.sim.recovery import DIE_TOGETHER, Recovery
from zerolayer.sim.results import RunKey, RunResult
from zerolayer.sim.traces import Trace

OFFLOADING = frozenset({"zerolayer"})
"""Policies of systems that move running streams before an engine is too full."""
HORIZON_FACTOR = 2.0
HORIZON_EXTRA_S = 900.0
"""Faults are drawn for this many times the arrivals' duration, and so long beyond."""

_MOVE_ROW = np.dtype(
    [("at_s", "f8"), ("source", "i2"), ("target", "i2"), ("context_tokens", "i4"),
     ("reason", "U24")]
)  # fmt: skip
_FAULT_ROW = np.dtype([("at_s", "f8"), ("until_s", "f8"), ("engine", "i2"), ("kind", "U16")])


@dataclass(frozen=True)
class RunSpec:
    """A run to do. Picklable, so that processes can share runs out among them."""

    trace: Trace
    """Its arrivals are squeezed to the rate that `key.utilisation` asks for. Every request must fit
    into an engine: see `sim.capacity.fitting`."""
    key: RunKey
    kind: EngineKind | FittedEngine = field(default_factory=EngineKind)
    requests_per_s: float | None = None
    """Offered rate; None: `offered_rate`."""
    weights: Weights | None = None
    """Weights of the policy's objective; None for its defaults."""
    offload: bool = True
    """Whether policies that move running streams proactively (OFFLOADING) do so."""


def offered_rate(spec: RunSpec) -> float:
    """Requests per second = utilisation * engines * what one engine sustains (`sim.capacity`)."""
    one = capacity(profile_of(spec.kind), spec.trace)
    return spec.key.utilisation * spec.key.engines * one


def run(spec: RunSpec, progress: Callable[[float], None] | None = None) -> RunResult:
    """Simulate `spec`. `progress` gets the share of requests that have ended, 0 to 1.

    Raises ConfigError for a policy, kind or fault level that is not there, and for requests that
    do not fit.
    """
    fleet = fleet_of(spec)
    if spec.offload and spec.key.policy in OFFLOADING and spec.key.continuation == "snapshot":
        Offloading(fleet)
    return run_fleet(fleet, spec.key, progress)


def run_fleet(
    fleet: SimFleet, key: RunKey, progress: Callable[[float], None] | None = None
) -> RunResult:
    """Let everything happen to a fleet that is to happen, until every request has ended."""
    began = time.perf_counter()
    recovery = Recovery(fleet, key.continuation, together=key.policy in DIE_TOGETHER)
    fleet.run(progress)
    sample_s, util, mem = fleet.samples.arrays()
    return RunResult(
        key=key,
        requests=fleet.clients.rows,
        sample_s=sample_s,
        util=util,
        mem=mem,
        moves=np.array(fleet.moves, dtype=_MOVE_ROW),
        faults=np.array([_fault_row(fault) for fault in recovery.happened], dtype=_FAULT_ROW),
        counts=_counts(fleet) | {"wall_s": time.perf_counter() - began},
        log_digest=fleet.log.digest(),
    )


def fleet_of(spec: RunSpec, plan: FaultPlan | None = None) -> SimFleet:
    """The fleet of a run before its first event; `plan` instead of one that is drawn."""
    key, profile = spec.key, profile_of(spec.kind)
    longest = int((spec.trace.prompt_tokens + spec.trace.output_tokens).max())
    if longest > profile.context_tokens_max:
        fix = f"leave out what is longer than {profile.context_tokens_max} tokens"
        raise ConfigError("--trace", spec.trace.name, fix)
    trace = spec.trace.at_rate(spec.requests_per_s or offered_rate(spec))
    return SimFleet(
        FleetSetup(
            trace=trace,
            engines=key.engines,
            profile=profile,
            policy=_policy(spec),
            plan=plan or _draw(key, profile, trace.duration_s),
            seed=key.seed,
            by_prefill=key.continuation == "reprefill",
            watch=key.continuation == "snapshot",
        )
    )


def _draw(key: RunKey, profile: EngineProfile, duration_s: float) -> FaultPlan:
    shape = FleetShape(key.engines, profile.gpus, profile.restart_s)
    horizon_s = HORIZON_FACTOR * duration_s + HORIZON_EXTRA_S
    return plan_faults(key.faults, shape, key.seed, horizon_s)


def _policy(spec: RunSpec) -> Policy:
    rng = Random(f"{spec.key.seed}/policy")
    return policy_entry(spec.key.policy).make(rng, spec.weights)


def _fault_row(fault: Fault) -> tuple[float, float, int, str]:
    until_s = fault.at_s + fault.found_s + fault.seconds
    return fault.at_s, until_s, fault.engine, fault.kind.value


def _counts(fleet: SimFleet) -> dict[str, float]:
    engines = fleet.engines
    return {
        "steps": float(sum(engine.steps for engine in engines)),
        "preemptions": float(sum(engine.preemptions for engine in engines)),
        "prefix_hit_tokens": float(sum(engine.hit_tokens for engine in engines)),
        "prefill_tokens": float(sum(engine.computed_tokens for engine in engines)),
        "restored_tokens": float(sum(engine.restored_tokens for engine in engines)),
        "decisions": float(fleet.decisions),
        "events": float(fleet.events),
        "simulated_s": fleet.now,
        "fenced_outputs": float(fleet.driver.totals.outputs_fenced),
    }
