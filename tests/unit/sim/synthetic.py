"""Run results made from a formula: what statistics and reports are tested with."""

import numpy as np

from zerolayer.core.fleet_state import Floats
from zerolayer.sim.results import REQUEST_ROW, Ending, RunKey, RunResult

MOVE = np.dtype(
    [
        ("at_s", "f8"), ("source", "i2"), ("target", "i2"), ("context_tokens", "i4"),
        ("reason", "U24"),
    ]
)  # fmt: skip
FAULT = np.dtype([("at_s", "f8"), ("until_s", "f8"), ("engine", "i2"), ("kind", "U16")])


def run_key(policy: str = "zerolayer", seed: int = 0, continuation: str = "snapshot") -> RunKey:
    return RunKey("azure_2023_conv", policy, continuation, 0.7, "base", 4, seed)


def synthetic_run(
    policy: str = "zerolayer", seed: int = 0, requests: int = 2000, slowness: float = 1.0,
    lost: int = 0,
) -> RunResult:  # fmt: skip
    """Log-normal latencies, `slowness` times as long; the last `lost` requests are lost."""
    rng = np.random.default_rng([seed, len(policy)])
    rows = np.zeros(requests, dtype=REQUEST_ROW)
    rows["arrival_s"] = np.sort(rng.uniform(0, 600, requests))
    rows["prompt_tokens"], rows["output_tokens"] = 1000, 100
    rows["ttft_s"] = slowness * rng.lognormal(-1.5, 0.8, requests)
    rows["worst_gap_s"] = slowness * rng.lognormal(-2.5, 1.0, requests)
    rows["e2e_s"] = rows["ttft_s"] + slowness * rng.lognormal(1.0, 0.5, requests)
    if lost:
        rows["ending"][-lost:] = Ending.LOST
        rows["e2e_s"][-lost:] = np.nan
    times: Floats = np.linspace(0.0, 599.0, 600, dtype=np.float64)
    wave = 0.7 + 0.25 * np.sin(times / 40)[:, None] * slowness
    util = np.clip(wave + 0.1 * slowness * rng.standard_normal((len(times), 4)), 0, 1.4)
    util[200:260, 2] = np.nan
    moves = np.array([(200.0 + i, 2, i % 2, 900, "engine lost") for i in range(20)], dtype=MOVE)
    faults = np.array([(200.0, 260.0, 2, "crash"), (400.0, 430.0, 1, "slow")], dtype=FAULT)
    continuation = "snapshot" if policy == "zerolayer" else "retry"
    if policy != "zerolayer":
        moves = moves[:0]
        rows["ending"][::400] = Ending.BROKEN
    return RunResult(
        run_key(policy, seed, continuation), rows, times, util, util * 0.8, moves, faults,
        {"steps": 1000.0, "decisions": float(requests)}, f"{policy}-{seed}",
    )  # fmt: skip
