"""Small traces and one engine without a fleet."""

from random import Random

import numpy as np

from zerolayer.dispatch.prefix_index import PrefixHolders
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.noise import NoiseLevel, StepNoise
from zerolayer.sim.prefix_cache import KvMemory
from zerolayer.sim.profiles import EngineProfile, FittedEngine, profile_of
from zerolayer.sim.results import RunKey
from zerolayer.sim.run import RunSpec
from zerolayer.sim.sequence import Seq, SimOutput, SimRequest
from zerolayer.sim.traces import Trace

KIND = FittedEngine(
    (0.01, 2e-5, 1e-4, 2e-8, 0.0), kv_tokens=40_000, requests_max=64, restart_s=(5.0, 10.0)
)


def small_trace(requests: int = 300, seed: int = 1, families: int = 0) -> Trace:
    """Poisson arrivals; with `families`, prompts of a family begin alike."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(20, 3000, requests)
    outputs = rng.geometric(0.01, requests)
    prefixes = None
    if families:
        prefixes = tuple(
            tuple(int(family) * 1000 + block for block in range(-(-int(prompt) // 512)))
            for family, prompt in zip(rng.integers(0, families, requests), prompts, strict=True)
        )
    return Trace(
        "small", np.cumsum(rng.exponential(1.0, requests)), prompts.astype(np.int64),
        outputs.astype(np.int64), prefixes, 512 if families else 0,
    )  # fmt: skip


def spec(
    policy: str = "least_requests", continuation: str = "snapshot", faults: str = "none",
    seed: int = 1, requests: int = 300, families: int = 0,
) -> RunSpec:  # fmt: skip
    """A run on four fitted engines at 70 % of what they can."""
    key = RunKey("small", policy, continuation, 0.7, faults, 4, seed)
    return RunSpec(small_trace(requests, families=families), key, KIND)


class Bench:
    """One engine, driven by hand."""

    def __init__(self, profile: EngineProfile | None = None, block_tokens: int = 0) -> None:
        self.profile = profile or profile_of(KIND)
        kv = KvMemory(0, self.profile.kv_tokens, block_tokens, PrefixHolders())
        self.engine = SimEngine(0, self.profile, kv, StepNoise(NoiseLevel(0.0), Random(0)))
        self.outputs: list[SimOutput] = []
        self.now = 0.0

    def submit(self, name: str, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> None:
        """A request comes now."""
        self.engine.submit(Seq(SimRequest(0, prompt, output, blocks), name, 0, 0), self.now)

    def step(self) -> None:
        """To the end of the running stretch, and into the next."""
        self.now = self.engine.end_s
        self.engine.finish()
        self.engine.start(self.now)
        self.collect()
        assert self.engine.kv.used >= 0
        assert self.engine.kv.used + self.engine.kv.cached <= self.engine.kv.capacity

    def run(self, until: float = float("inf")) -> None:
        """As long as there is work that ends by then."""
        while self.engine.busy and self.engine.end_s <= until:
            self.step()
        self.now = max(self.now, until if until < float("inf") else self.now)

    def collect(self) -> None:
        """Take what lies in the outbox."""
        self.outputs += self.engine.outbox
        self.engine.outbox.clear()

    def of(self, name: str) -> list[SimOutput]:
        """What one request got."""
        return [output for output in self.outputs if output.request_id == name]

    def tokens(self, name: str) -> int:
        """How many tokens one request got."""
        return sum(len(output.new_token_ids) for output in self.of(name))
