"""One simulated run: from what is asked to what came out."""

from collections.abc import Callable
from dataclasses import dataclass, field

from zerolayer.sim.results import RunKey, RunResult
from zerolayer.sim.traces import Trace


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What hardware and model the engines are; names as in `data/profiles`."""

    gpu: str = "h100-sxm-80gb"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1


@dataclass(frozen=True)
class RunSpec:
    """A run to do. Picklable, so that processes can share runs out among them."""

    trace: Trace
    """As loaded; its arrivals are squeezed to the rate that `key.utilisation` asks for."""
    key: RunKey
    kind: EngineKind = field(default_factory=EngineKind)
    requests_per_s: float | None = None
    """Offered rate; None: utilisation * engines * what one engine sustains (`sim.capacity`)."""
    weights: tuple[float, float, float] | None = None
    """Weights of the policy's objective; None for its defaults."""


def run(spec: RunSpec, progress: Callable[[float], None] | None = None) -> RunResult:
    """Simulate `spec`. `progress` gets the share of requests that have ended, 0 to 1.

    Raises ConfigError for a policy, kind or trace that is not there.
    """
    raise NotImplementedError
